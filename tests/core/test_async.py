"""Asynchronous PPO with a critic as a graph: it learns, and keeps what a script of ranks promises."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from test_equal_numbers import TRAINING, launch_command
from testing_quickstart import write_tiny_model
from testing_rollouts import stored_rows

from arealite.core.records import overlap, read_calls
from arealite.rollout.account.rollout_file import read_update
from arealite.weights.log import read_weights

BOUND = 2
STEPS, BATCH, SAMPLES = 16, 12, 4
CHECKPOINT = 10  # steps, after which there is one
EVEN = """
def even(prompt, completions, prompt_ids, completion_ids, **row):
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)
"""
CARD = re.compile(r"<dt>(.*?)</dt><dd>(.*?)</dd><p>(.*?)</p>")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("core_async")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a random model to write even tokens, with two servers, and return the run folder."""
    folder = tmp_path_factory.mktemp("async")
    write_tiny_model(out=folder / "model", corpus=None, seed=1)
    (folder / "even.py").write_text(EVEN)
    keys = ["allocation_mode=lite.d2p1t1+d1p1t1", "async_training=true", f"rollout.max_head_offpolicyness={BOUND}"]
    keys += ["workers.ref.ranks=1", "ref={}", "actor.kl_ctl=0.001"]
    keys += ["workers.critic.ranks=1", f"total_train_steps={STEPS}", f"reward={folder / 'even.py'}:even"]
    keys += [f"train_dataset.batch_size={BATCH}", f"gconfig.n_samples={SAMPLES}", "gconfig.max_new_tokens=8"]
    keys += ["actor.optimizer.lr=3e-3", "evaluator.freq_steps=null", "valid_dataset=null"]
    keys += [f"recover.freq_steps={CHECKPOINT}"]
    completed(launch_command(folder, "async", TRAINING / "main_async_ppo.py", "gsm8k_ppo", *keys))
    return folder / "core" / "async"


def test_it_learns(run: Path) -> None:
    """Four steps have 192 completions of 8 tokens: without learning their mean varies by about 0.013."""
    rewards = [row["reward/mean"] for row in metrics(run)]
    assert rewards[0] == pytest.approx(0.5, abs=0.1)
    assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.2
    last = metrics(run)[-1]
    assert metrics(run)[0]["value/mean"] == 0 and last["value/mean"] == pytest.approx(last["value/return"], abs=0.15)


def test_no_token_is_staler_than_the_bound(run: Path) -> None:
    samples = [row for path in run.glob("rollouts/step_*") for row in stored_rows(path)]
    assert len(samples) == STEPS * BATCH * SAMPLES and len({one["server"] for one in samples}) >= 2
    staleness = [
        one["trained_step"] - version
        for one in samples
        for version, is_trained in zip(one["versions"], one["loss_mask"], strict=True)
        if is_trained
    ]
    assert min(staleness) == 0 and max(staleness) == BOUND
    assert max(row["staleness/max"] for row in metrics(run)) == BOUND


def test_numbers_of_an_update_are_stored_beside_the_batch_that_it_was_of(run: Path) -> None:
    for step in range(STEPS):
        samples = stored_rows(folder := run / "rollouts" / f"step_{step}")
        updates = read_update(folder / "0.parquet", range(len(samples)))
        for sample, update in zip(samples, updates, strict=True):
            assert {len(values) for values in update.values()} == {len(sample["input_ids"])}
            assert {a for a, is_trained in zip(update["advantages"], sample["loss_mask"]) if not is_trained} == {0.0}


def test_no_prompt_is_lost_or_repeated(run: Path, measured: Callable[..., None]) -> None:
    audit = json.loads(completed(arealite("ledger", str(run), "--json")))
    measured(lost=audit["lost"], repeated=audit["repeated"])
    assert audit["adds_up"] and audit["lost"] == 0 and audit["repeated"] == 0


def test_page_metrics_and_log_agree_on_the_calls_of_a_step(run: Path, measured: Callable[..., None]) -> None:
    calls = [one for one in read_calls(run / "calls.jsonl") if "." not in one.call]
    for step, row in enumerate(metrics(run)):
        of_step = [one for one in calls if one.step == step]
        assert row["core/overlap"] == pytest.approx(overlap(of_step))
        assert {one.call: row[f"core/{one.call}_s"] for one in of_step} == pytest.approx(
            {one.call: one.seconds for one in of_step}
        )
    page = (run / "graph.html").read_text()
    cards = {name: (value, note) for name, value, note in CARD.findall(page)}
    assert cards["Overlap"][0] == f"{overlap(of_step):.2f}"
    measured(overlap_of_a_step=round(overlap(of_step), 3))
    assert cards["Last step"][1] == f"{len(of_step)} calls of step {STEPS - 1}" == f"6 calls of step {STEPS - 1}"
    assert f"Timeline of step {STEPS - 1}<" in page


@pytest.mark.long
def test_a_step_can_be_replayed(run: Path) -> None:
    """It continues from the checkpoint, with the critic's part of it."""
    shown = completed(arealite("replay", str(run), "--step", str(STEPS - 2)))
    fingerprint = read_weights(run)[STEPS - 1]
    assert f"weights of version {STEPS - 1} are bit-identical (fingerprint {fingerprint})" in shown
    assert f"resuming after step {CHECKPOINT - 1}" in shown


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of each training step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][:STEPS]


def arealite(*words: str) -> list[str]:
    return [sys.executable, "-m", "arealite.cli.main", *words]


def completed(command: list[str]) -> str:
    """Return what a command that must succeed prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr
