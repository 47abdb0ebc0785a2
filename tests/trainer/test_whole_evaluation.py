"""A whole evaluation through a real embedded server, held to its own JSON lines; what an interruption leaves."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tiny_models
import torch
from testing_lite import LiteServer
from testing_metrics import undocumented
from testing_rollouts import edit_rows, stored_rows
from testing_server import serve
from transformers import AutoModelForCausalLM

from arealite.api.errors import ConfigError, EpisodeError
from arealite.rollout.account.rollout_file import batch_files
from arealite.utils.files import FileError

SCRIPT = Path(__file__).parents[2] / "examples" / "arealite" / "evaluate.py"
ROWS = """
def rows(split, *, seed):
    return [{"question": word, "answer": "e"} for word in ("an", "banana", "the thing", "in", "a b", "th ing")]


def right(completions, answer, **others):
    return float(answer in completions)


def length(completions, **others):
    return len(completions) / 7


def fails(completions, prompt, **others):
    if prompt == "in":
        raise RuntimeError("no verdict")
    return float("e" in completions)
"""
NUM_SAMPLES = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.save_qwen3(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of data and rewards, which a process imports once."""
    path = tmp_path_factory.mktemp("own") / "own_of_evaluation.py"
    path.write_text(ROWS)
    return path


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[LiteServer]:
    torch.set_num_threads(1)
    with serve(lite := LiteServer(AutoModelForCausalLM.from_pretrained(model), slots=32)):
        yield lite


class Command:
    """`evaluate.py` on six prompts, started in this process; every start has the same folder."""

    def __init__(self, folder: Path, own: Path, model: str, server: LiteServer) -> None:
        self.own, self.run = own, folder / "runs" / "e" / "t"
        self.words = [
            *("experiment_name=e", "trial_name=t", f"cluster.fileroot={folder / 'runs'}", "cluster.n_gpus_per_node=0"),
            *("allocation_mode=''", f"rollout.server_addrs=[{server.address}]", "rollout.backend=lite"),
            *(f"model.path={model}", f"valid_dataset.path={self.own}:rows", "gconfig.max_new_tokens=4"),
            *(f"gconfig.n_samples={NUM_SAMPLES}", "rollout.reward_workers=1"),
        ]
        (folder / "empty.yaml").write_text("{}\n")
        self.config = folder / "empty.yaml"

    def __call__(self, *more: str, reward: str = "right") -> dict[str, float]:
        """Evaluate, and return the row of metrics."""
        words = ["--config", str(self.config), *self.words, f"reward={self.own}:{reward}", *more]
        runpy.run_path(str(SCRIPT))["main"](words)
        (row,) = self.lines(self.run / "metrics.jsonl")
        assert undocumented(row) == set()
        return row

    def lines(self, path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    def samples(self, name: str) -> list[dict[str, Any]]:
        return stored_rows(self.run / "rollouts" / name)


@pytest.fixture
def evaluate(tmp_path: Path, own: Path, model: str, server: LiteServer) -> Command:
    return Command(tmp_path, own, model, server)


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, own: Path, model: str, server: LiteServer
) -> tuple[Path, dict[str, float]]:
    """Return the folder of an evaluation, and its row of metrics."""
    evaluate = Command(tmp_path_factory.mktemp("finished"), own, model, server)
    row = evaluate()
    return evaluate.run, row


@pytest.fixture
def again(evaluate: Command, finished: tuple[Path, dict[str, float]]) -> Command:
    """Return the command after it was done."""
    shutil.copytree(finished[0], evaluate.run)
    return evaluate


def test_an_evaluation_is_what_its_lines_say(
    again: Command, finished: tuple[Path, dict[str, float]], model: str
) -> None:
    evaluate, row = again, finished[1]
    tokenizer, policy = tiny_models.tokenizer(), AutoModelForCausalLM.from_pretrained(model)
    greedy, sampled = evaluate.samples("greedy"), evaluate.samples("sampled")
    assert {line["prompt_id"] for line in greedy} == {f"0-{i}" for i in range(6)}
    assert [(line["sample"], len(line["prompt_id"])) for line in sampled] == [(i, 3) for i in range(NUM_SAMPLES)] * 6
    right: dict[str, list[float]] = {}
    for line in [*greedy, *sampled]:
        ids, start = line["input_ids"], line["loss_mask"].index(1)
        assert line["segments"] == [
            {"given": tokenizer.decode(ids[:start])},
            {"sampled": tokenizer.decode(ids[start:])},
        ]
        assert line["reward"] == float("e" in tokenizer.decode(ids[start:], skip_special_tokens=True))
        with torch.no_grad():
            logits = policy(torch.tensor([ids])).logits[0, start - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[start:])[:, None])[:, 0].tolist()
        if line["prompt_id"].startswith("0-"):
            assert ids[start:] == logits.argmax(-1).tolist()
        else:
            assert line["logprobs"][start:] == pytest.approx(expected, abs=1e-4)
            right.setdefault(line["prompt_id"], []).append(line["reward"])
    assert len({tuple(line["input_ids"]) for line in sampled if line["prompt_id"] == "1-1"}) > 1, "samples differ"

    assert row["greedy/accuracy"] == sum(line["reward"] for line in greedy) / 6
    assert row["sampled/accuracy"] == pytest.approx(sum(line["reward"] for line in sampled) / 36)
    assert 0.1 < row["sampled/accuracy"] < 0.9, "else the numbers below say little"
    for k in (1, 2, 4, 6):
        best = [sum(map(max, combinations(one, k))) / len([*combinations(one, k)]) for one in right.values()]
        assert row[f"sampled/pass@{k}"] == pytest.approx(sum(best) / 6)
        assert row[f"sampled/pass@{k}_low"] < row[f"sampled/pass@{k}"] <= row[f"sampled/pass@{k}_high"]
    assert row["sampled/completion_tokens"] == pytest.approx(sum(sum(line["loss_mask"]) for line in sampled) / 36)
    is_cut = [line["input_ids"][-1] != tiny_models.EOS for line in sampled]
    assert row["sampled/truncated_ratio"] == pytest.approx(sum(is_cut) / 36)
    solved = json.loads((evaluate.run / "summary.json").read_text())["solved"]
    assert solved == [[sum(one) for one in right.values()].count(c) for c in range(NUM_SAMPLES + 1)]
    page = (evaluate.run / "report.html").read_text()
    assert f'["pass@4","{row["sampled/pass@4"]:.1%}",' in page


def test_the_same_command_asks_only_what_is_not_answered(
    again: Command, finished: tuple[Path, dict[str, float]], server: LiteServer
) -> None:
    evaluate, whole, path = again, finished[1], again.run / "rollouts" / "sampled"
    lines = evaluate.samples("sampled")
    last = max(batch_files(path))
    assert last > 0, "the first episode is kept at once"
    (path / f"{last}.parquet").rename(path / f".{last}.parquet.unfinished")  # a crash
    kept = evaluate.samples("sampled")
    assert 0 < len(kept) < len(lines)
    row = evaluate()
    now = evaluate.samples("sampled")
    assert now[: len(kept)] == kept, "what was whole is kept"
    assert {line["prompt_id"] for line in now} == {line["prompt_id"] for line in lines} and len(now) == len(lines)
    times = {key for key in whole if key.startswith("time/")}
    assert {key: row[key] for key in whole.keys() - times} == {key: whole[key] for key in whole.keys() - times}

    served = server.engine.stats()
    assert evaluate("pass_at_k=[3]")["sampled/pass@3"] < row["sampled/pass@4"], "k may be chosen afterwards"
    assert server.engine.stats() == served, "nothing was sampled"
    assert evaluate("gconfig.temperature=0.5")["sampled/accuracy"] != whole["sampled/accuracy"]
    assert len(evaluate.samples("sampled")) == 36, "other sampling begins anew"
    assert [*evaluate.run.parent.glob("t.replaced-*")] != [], "and what was there is moved aside"


def test_samples_of_prompts_that_are_gone_are_not_counted(evaluate: Command, tmp_path: Path) -> None:
    """A file with fewer rows than before is another data set."""
    rows = [f'{{"question": "{word}", "answer": "e"}}\n' for word in ("an", "banana", "in")]
    (data := tmp_path / "rows.jsonl").write_text("".join(rows))
    evaluate(f"valid_dataset.path={data}")
    data.write_text(rows[0])
    with pytest.raises(
        EpisodeError, match=r"greedy must have samples of the 1 prompts of the data only: got 3 prompts"
    ):
        evaluate(f"valid_dataset.path={data}")


def test_rewards_that_are_no_verdict_have_no_pass_at_k(evaluate: Command) -> None:
    row = evaluate("eval_gconfig=null", reward="length")
    rewards = [line["reward"] for line in evaluate.samples("sampled")]
    assert row["sampled/reward"] == pytest.approx(sum(rewards) / 36)
    assert row["sampled/reward_low"] < row["sampled/reward"] < row["sampled/reward_high"]
    assert not {key for key in row if "accuracy" in key or "pass@" in key or "greedy" in key}
    assert '"pass@' not in (evaluate.run / "report.html").read_text()


def test_a_prompt_that_fails_is_wrong(evaluate: Command) -> None:
    row = evaluate("rollout.max_failed_share=1", "gconfig.top_k=40", reward="fails")
    sampled = evaluate.samples("sampled")
    assert row["sampled/num_failed"] == row["greedy/num_failed"] == 1
    assert row["sampled/pass@1"] == pytest.approx(row["sampled/accuracy"]) and row["sampled/pass@6"] <= 5 / 6
    assert all(line["more"].keys() == {"no_eos"} for line in sampled), "kept sets are for training"
    assert len(sampled) == 30 and row["sampled/accuracy"] == pytest.approx(sum(one["reward"] for one in sampled) / 36)


def test_a_workflow_need_not_tell_which_answers_were_cut_off(
    again: Command, finished: tuple[Path, dict[str, float]]
) -> None:
    for name in ("greedy", "sampled"):
        for file in batch_files(again.run / "rollouts" / name).values():
            table = pq.read_table(file, partitioning=None)
            pq.write_table(table.drop_columns("more"), file)
    row = again()
    assert not {key for key in row if "truncated" in key}
    assert row["sampled/accuracy"] == finished[1]["sampled/accuracy"]


def test_a_config_that_is_not_one_is_named(evaluate: Command) -> None:
    evaluate.run.mkdir(parents=True)
    (evaluate.run / "config.yaml").write_text("")
    with pytest.raises(FileError, match=r"e/t/config.yaml must be as its writer left it: got .* NoneType in place of"):
        evaluate()


def test_samples_of_two_versions_are_refused(again: Command) -> None:
    def of_another_version(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows[-1]["versions"][-1] = 1
        return rows

    edit_rows(again.run / "rollouts" / "sampled", of_another_version)
    with pytest.raises(EpisodeError, match=r"one version of the weights: got \[0, 1\]"):
        again()


def test_a_server_with_another_vocabulary_is_refused(evaluate: Command, tmp_path: Path) -> None:
    other = tiny_models.build(tiny_models.config(vocab_size=50), seed=0)
    other.save_pretrained(tmp_path / "other")
    tiny_models.tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"must serve a model with the vocabulary of .*got 48 token ids and 50"):
        evaluate(f"model.path={tmp_path / 'other'}")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("pass_at_k=[1,7]", "pass_at_k must be at most gconfig.n_samples: got 7 and 6"),
        ("allocation_mode=lite.d1+d1", "allocation_mode must be servers and eval"),
        ("gconfig.greedy=true", "gconfig.greedy must be false"),
        ("train_dataset.path=gsm8k", "train_dataset.path must not be given in an evaluation: got gsm8k"),
    ],
)
def test_what_means_nothing_is_refused(evaluate: Command, word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        evaluate(word)
