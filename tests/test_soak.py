"""A trainer of thousands of steps holds what it held after some hundreds."""

from __future__ import annotations

from pathlib import Path
from statistics import linear_regression, median

import pytest
from chaos.experiment import ENTRY, WORD_PROBLEMS, Experiment

from arealite.utils.files import read_jsonl

STEPS, WARM_UP, PERIOD = 2000, 500, 50
WINDOW = 6  # rows
DEADLINE_S = 1800.0
BYTES_PER_STEP = 14_336  # measured medians: 19,700 when checkpoints read all of metrics.jsonl, 3,000 to 9,700 since
NOTE = f"""
import ctypes, gc, json, os
def anonymous():  # pages of libraries would count as ours once no other process has them
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if "Anonymous" in line)
def note(step):
    if step % {PERIOD} == {PERIOD // 2}:  # neither an evaluation nor a checkpoint is under way
        used = anonymous()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free varies by tens of MiB
        row = dict(step=step, used=used, held=anonymous(), files=len(os.listdir("/proc/self/fd")))
        with open("held.jsonl", "a") as file:
            file.write(json.dumps(row) + "\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("allocation", ["lite.d1|d1", pytest.param("lite.d1+d1", marks=pytest.mark.long)])
def test_a_trainer_keeps_nothing_of_its_steps(model: Path, tmp_path: Path, allocation: str) -> None:
    before, commit, after = ENTRY.read_text().partition("        stats.commit(step)\n")
    entry = tmp_path / "entry.py"
    entry.write_text(f"{NOTE}{before}{commit}        note(step)\n{after}")
    overrides = {
        "gconfig.max_new_tokens": 2,
        "evaluator.freq_steps": 100,
        "train_dataset.path": f"{WORD_PROBLEMS}?train=64&test=2",
        "total_train_epochs": STEPS,
        "launcher.trainer_threads": 1,
    }
    sizes = {"steps": STEPS, "batch_size": 8, "group_size": 2, "checkpoint_steps": 100}
    run = Experiment(tmp_path, model, allocation, entry=entry, overrides=overrides, **sizes)  # type: ignore[arg-type]
    launcher = run.launch()
    assert launcher.process.wait(DEADLINE_S) == 0, launcher.text()
    rows = [row for row in read_jsonl(tmp_path / "held.jsonl") if row["step"] >= WARM_UP]
    assert len(rows) == (STEPS - WARM_UP) // PERIOD
    windows = [rows[start : start + WINDOW] for start in range(0, len(rows), WINDOW)]
    growth = median(  # what is kept grows in each window; what malloc can't give back grows once in a while
        linear_regression([row["step"] for row in window], [row["held"] for row in window]).slope for window in windows
    )
    print(f"{allocation}: {growth:.0f} bytes per step, {rows[0]['held']} at step {rows[0]['step']}")
    assert growth < BYTES_PER_STEP, rows
    assert rows[-1]["files"] <= rows[0]["files"] + 4, rows
