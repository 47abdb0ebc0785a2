"""What an update computed per token is stored row for row beside its batch."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tensordict import TensorDict
from test_store import finished, trajectory_of
from testing_rollouts import stored_rows

from arealite.api.cli_args import InferenceEngineConfig
from arealite.rollout.account.rollout_file import read_update
from arealite.rollout.account.store import RolloutStore, is_stored, update_of
from arealite.rollout.trajectory import assemble_batch, split_batch
from arealite.utils.packed import join, unpack

CONFIG = InferenceEngineConfig(fileroot="runs", experiment_name="e", trial_name="t")


def trained(batch: TensorDict, seed: int = 0) -> TensorDict:
    """Return a batch with what a trainer adds."""
    generator = torch.Generator().manual_seed(seed)
    for key in ("advantages", "proximal_logprobs", "log_ratio"):
        batch[key] = torch.randn(batch["input_ids"].shape, generator=generator)
    return batch


def actor_with(**per_token: torch.Tensor) -> SimpleNamespace:
    """Return what the store sees of a policy."""
    return SimpleNamespace(per_token=per_token)


def stored(folder: Path, sizes: list[int], num_ranks: int, share: float = 1.0) -> list[TensorDict]:
    """Store two batches and their updates; return the second as its ranks had it."""
    store, generator = RolloutStore(folder, share), torch.Generator().manual_seed(1)
    for seed in range(2):
        trajectories = [trajectory_of(generator, size, False) for size in sizes]
        store.append("step_3", [finished(index, one) for index, one in enumerate(trajectories)], 3)
        store.append("eval_step_3", [finished(index, one) for index, one in enumerate(trajectories)], None)
        shares = [trained(unpack(join(share)), seed) for share in split_batch(trajectories, num_ranks)]
        updates = [update_of(actor_with(log_ratio=one["log_ratio"][one["attention_mask"]]), one) for one in shares]
        store.append_update([update for update in updates if update is not None])
    store.close()
    return shares


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_row_has_the_numbers_of_its_own_tokens(tmp_path: Path, num_ranks: int) -> None:
    sizes = [3, 1, 4, 2, 3]
    shares = stored(tmp_path, sizes, num_ranks)
    rows = [row for row in stored_rows(tmp_path / "step_3") if row["batch"] == 1]
    found = read_update(tmp_path / "step_3/1.parquet", range(len(rows)))
    assert len(found) == sum(sizes) and not (tmp_path / "eval_step_3/_update").exists()
    by_tokens = {}
    for share in shares:
        for one in share:
            real, sampled = one["attention_mask"], one["loss_mask"].bool()
            gap = torch.where(sampled, one["proximal_logprobs"] - one["logprobs"], torch.nan)
            numbers = {"advantages": one["advantages"], "logprob_gap": gap, "log_ratio": one["log_ratio"]}
            by_tokens[tuple(one["input_ids"][real].tolist())] = {key: value[real] for key, value in numbers.items()}
    for row, update in zip(rows, found, strict=True):
        expected = by_tokens[tuple(row["input_ids"])]
        assert update.keys() == expected.keys()
        for key, values in expected.items():
            np.testing.assert_allclose(update[key], values, rtol=2**-10, atol=0)


def test_rows_without_tokens_have_no_numbers(tmp_path: Path) -> None:
    stored(tmp_path, [1] * 40, 2, share=0.5)
    rows = [row for row in stored_rows(tmp_path / "step_3") if row["batch"] == 0]
    found = read_update(tmp_path / "step_3/0.parquet", range(40))
    is_stored = [row["input_ids"] is not None for row in rows]
    assert 0 < sum(is_stored) < 40 and [update["advantages"] is not None for update in found] == is_stored


def test_other_tools_read_the_folder_of_a_step_as_before_and_a_resume_removes_both(tmp_path: Path) -> None:
    stored(tmp_path, [2, 2], 1)
    assert len(pd.read_parquet(tmp_path / "step_3")) == 8
    RolloutStore(tmp_path).trim(3)
    assert list(tmp_path.iterdir()) == []


def test_what_is_unknown_stays_so_and_nothing_is_too_large(tmp_path: Path) -> None:
    batch = assemble_batch([trajectory_of(torch.Generator().manual_seed(2), 1, False)])
    batch["advantages"] = torch.full(batch["input_ids"].shape, 3e38)
    unknown = torch.full((int(batch["attention_mask"].sum()),), math.nan)
    update = update_of(actor_with(log_ratio=unknown, logprob_gap=unknown - 1), batch)
    assert update is not None and all(np.isnan(update.numbers[key]).all() for key in ("log_ratio", "logprob_gap"))
    np.testing.assert_allclose(update.numbers["advantages"], 3e38, rtol=2**-10)


@pytest.mark.parametrize("change", [{"fileroot": ""}, {"stored_share": 0.0}, {"replay_from": "runs/e/t"}])
def test_runs_that_store_no_updates(change: dict[str, Any]) -> None:
    assert is_stored(CONFIG) and not is_stored(CONFIG.new(**change))


def test_what_was_not_trained_on_has_no_update_and_what_another_batch_left_is_no_part_of_one() -> None:
    batch = assemble_batch([trajectory_of(torch.Generator().manual_seed(2), 2, False)])
    values = torch.zeros(int(batch["attention_mask"].sum()))
    assert update_of(actor_with(log_ratio=values), batch) is None
    update = update_of(actor_with(log_ratio=values[1:]), trained(batch))
    assert update is not None and update.numbers.keys() == {"advantages", "logprob_gap"}
