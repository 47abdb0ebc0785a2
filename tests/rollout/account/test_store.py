"""What a run stores of its batches is enough to hand them out again."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow.dataset
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from testing_rollouts import stored_rows, write_rows

from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError
from arealite.api.io_struct import PromptId
from arealite.api.workflow_api import RolloutWorkflow
from arealite.rollout.account.store import RolloutStore, read_batches
from arealite.rollout.prompts import Episode, Prompt
from arealite.rollout.trajectory import assemble_batch


class NoWorkflow(RolloutWorkflow):
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict:
        raise NotImplementedError


def finished(index: int, trajectory: TensorDict) -> Episode:
    episode = Episode(Prompt(PromptId(0, index), workflow=NoWorkflow()), attempt=0, head_version=0, seed=1)
    episode.trajectory = trajectory
    return episode


def trajectory_of(generator: torch.Generator, num_rows: int, extra: bool) -> TensorDict:
    """Return rows of random lengths with every key that a user may add."""
    lengths = torch.randint(1, 9, (num_rows,), generator=generator)
    width = int(lengths.max())
    is_real = torch.arange(width) < lengths[:, None]
    shape = (num_rows, width)
    columns = {
        "input_ids": torch.randint(0, 2**40, shape, generator=generator) * is_real,
        "attention_mask": is_real,
        "loss_mask": torch.randint(0, 2, shape, generator=generator) * is_real,
        "logprobs": torch.randn(shape, generator=generator).where(is_real, 0),
        "versions": torch.where(is_real, torch.randint(0, 9, shape, generator=generator), -1),
        "rewards": torch.randn(num_rows, generator=generator, dtype=torch.float64 if extra else torch.float32),
        "no_eos": torch.randint(0, 2, (num_rows,), generator=generator).bool(),
        "sample_index": torch.randint(0, 3, (num_rows,), generator=generator).sort().values,
    }
    if extra:
        columns["attention_mask"] = is_real.long()
        columns["token_rewards"] = torch.randn(shape, generator=generator).where(is_real, 0).bfloat16()
        columns["values_of_heads"] = torch.randn((*shape, 3), generator=generator).where(is_real[..., None], 0)
        columns["difficulty"] = torch.tensor([math.inf, -0.0, 1e-42][:num_rows] + [0.1] * (num_rows - 3))
        counts = torch.randint(0, 4, shape, generator=generator, dtype=torch.int32) * is_real
        num_kept = counts.sum(1)
        ids = torch.randint(0, 2**30, (num_rows, int(num_kept.max())), generator=generator, dtype=torch.int32)
        columns["kept_counts"] = counts
        columns["kept_ids"] = ids * (torch.arange(ids.shape[1]) < num_kept[:, None])
        columns["pixels"] = torch.randn((num_rows, 17, 2), generator=generator, dtype=torch.float16)
    return TensorDict(columns, batch_size=[num_rows])


@given(st.integers(0, 10**6), st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), max_size=3), st.booleans())
def test_batches_come_back_bit_for_bit(
    tmp_path_factory: Any, seed: int, sizes_of_batches: list[list[int]], extra: bool
) -> None:
    folder: Path = tmp_path_factory.mktemp("run")
    generator = torch.Generator().manual_seed(seed)
    store, expected = RolloutStore(folder), []
    for sizes in sizes_of_batches:
        trajectories = [trajectory_of(generator, size, extra) for size in sizes]
        store.append("step_3", [finished(7, one) for one in trajectories], 3)
        expected.append(assemble_batch(trajectories))
    store.close()
    found = list(map(assemble_batch, read_batches(folder / "step_3")))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert sorted(one.keys()) == sorted(other.keys())
        for key in one.keys():  # noqa: SIM118 - a TensorDict is iterated by rows
            assert one[key].dtype == other[key].dtype and one[key].shape == other[key].shape, key
            assert torch.equal(one[key].contiguous().view(torch.uint8), other[key].contiguous().view(torch.uint8)), key


def test_nothing_is_kept_of_a_step_that_is_written(tmp_path: Path) -> None:
    store, generator = RolloutStore(tmp_path), torch.Generator().manual_seed(0)
    for step in range(30):
        store.append(f"step_{step}", [finished(step, trajectory_of(generator, 1, False))], step)
    store.flush()
    gc.collect()
    paths = [one for one in gc.get_objects() if isinstance(one, Path) and one.is_relative_to(tmp_path)]
    store.close()
    assert len(paths) < 10 and len(list(tmp_path.iterdir())) == 30


class Letters:
    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_a_line_tells_what_was_given_and_sampled_in_turn_and_its_run(tmp_path: Path) -> None:
    text, kinds = "ask.try.no.again", "0000111100011111"
    length = len(text)
    columns = {"input_ids": list(map(ord, text)), "loss_mask": list(map(int, kinds)), "logprobs": [0.0] * length}
    columns |= {"versions": [-1] * length, "attention_mask": [True] * length, "rewards": 1.0, "sample_index": 4}
    row = TensorDict({key: torch.tensor([value]) for key, value in columns.items()}, batch_size=[1])
    workflow = NoWorkflow()
    workflow.tokenizer = Letters()  # type: ignore[attr-defined]
    episode = Episode(Prompt(PromptId(0, 1), workflow=workflow), attempt=0, head_version=0, seed=1)
    episode.trajectory = torch.cat([row, row])  # type: ignore[assignment]
    store = RolloutStore(tmp_path)
    store.append("step_0", [episode], 0)
    store.close()
    lines = stored_rows(tmp_path / "step_0")
    assert [(line["sample"], line["row"], line["num_rows"]) for line in lines] == [(4, 0, 2), (4, 1, 2)]
    expected = [{"given": "ask."}, {"sampled": "try."}, {"given": "no."}, {"sampled": "again"}]
    assert [line["segments"] for line in lines] == [expected, expected]


def test_files_of_later_versions_are_removed_from_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "run [1]*?" / "rollouts"
    for name in ("step_0", "step_1", "eval_step_0", "eval_step_2"):
        write_rows(folder / name, [{"prompt_id": "0-0"}])
    store = RolloutStore(folder)
    store.trim(1)
    store.close()
    assert sorted(path.name for path in folder.iterdir()) == ["eval_step_0", "step_0"]


def test_a_share_of_the_episodes_is_stored_whole_and_of_all_prompts_and_rewards(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    store, episodes = RolloutStore(tmp_path, 0.3), []
    for index in range(200):
        episodes.append(finished(index, trajectory_of(generator, 2, extra=False)))
    store.append("step_0", episodes, 0)
    store.append("eval_step_0", episodes[:10], None)
    store.close()
    rows = stored_rows(tmp_path / "step_0")
    assert [row["prompt_id"] for row in rows] == [f"0-{index}" for index in range(200) for _ in range(2)]
    assert [row["reward"] for row in rows] == torch.cat([one.trajectory["rewards"] for one in episodes]).tolist()
    whole = {row["prompt_id"] for row in rows if row["input_ids"] is not None}
    assert 40 <= len(whole) <= 80 and len([row for row in rows if row["loss_mask"] is None]) == 2 * (200 - len(whole))
    assert all(row["input_ids"] for row in stored_rows(tmp_path / "eval_step_0")), "evaluations are stored whole"
    with pytest.raises(ConfigError, match=r"all its tokens: got .*step_0/0.parquet, which lacks those of prompt 0-"):
        read_batches(tmp_path / "step_0")


@pytest.mark.parametrize("shares", [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_others_read_the_files_with_a_line(tmp_path: Path, shares: tuple[float, ...]) -> None:
    """As docs/metrics.md shows, also if nothing of a step is stored whole."""
    for step, share in enumerate(shares):
        episode = finished(step, trajectory_of(torch.Generator().manual_seed(step), 3, extra=True))
        store = RolloutStore(tmp_path, share)
        store.append(f"step_{step}", [episode], step)
        store.close()
    rewards = [row["reward"] for step in range(2) for row in stored_rows(tmp_path / f"step_{step}")]
    assert pd.concat(map(pd.read_parquet, sorted(tmp_path.glob("step_*"))))["reward"].tolist() == rewards
    paths = sorted(map(str, tmp_path.glob("step_*/*")))
    table = pyarrow.dataset.dataset(paths).to_table()
    assert table["reward"].to_pylist() == rewards
    for name in ("segments", "input_ids", "loss_mask", "logprobs", "versions", "more"):
        assert table[name].null_count == sum(3 for share in shares if not share or name == "segments"), name
    files = {"data_files": f"{tmp_path}/step_*/*.parquet", "cache_dir": str(tmp_path / "cache")}
    assert list(datasets.load_dataset("parquet", split="train", **files)["reward"]) == rewards
