"""`arealite train trainer.type=null`: a launcher, an embedded server and the script, interrupted and continued."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from testing_lite import LiteServer
from testing_quickstart import WORD_PROBLEMS, write_tiny_model
from testing_rollouts import stored_rows
from testing_runs import arealite, metrics
from testing_server import serve
from transformers import AutoModelForCausalLM

from arealite.rollout.account.rollout_file import batch_files

pytestmark = pytest.mark.slow
DEADLINE_S = 600.0


def test_an_evaluation_that_is_stopped_continues(tmp_path: Path) -> None:
    model = write_tiny_model(out=tmp_path / "model", corpus=None, seed=1)
    words = [
        *("trainer.type=null", f"trainer.null.model.path={model}", "experiment_name=e", "trial_name=t"),
        *(f"cluster.fileroot={tmp_path}", "cluster.n_gpus_per_node=0", f"valid_dataset.path={WORD_PROBLEMS}"),
        *("valid_dataset.max_rows=12", "gconfig.max_new_tokens=128", "rollout.max_concurrent_rollouts=4"),
        *("lite.slots=4", "launcher.preflight=false"),
    ]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    start = [sys.executable, "-m", "arealite.cli.main", *words]
    command = subprocess.Popen(start, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert command.stdout is not None
    for line in command.stdout:
        if "greedy: " in line:
            break
    sampled = tmp_path / "e" / "t" / "rollouts" / "sampled"
    while not batch_files(sampled):
        assert command.poll() is None
        time.sleep(0.02)
    command.send_signal(signal.SIGINT)
    output, _ = command.communicate(timeout=DEADLINE_S)
    assert command.returncode == 128 + signal.SIGINT and "the same command continues" in output, output
    kept = stored_rows(sampled)
    assert 0 < len(kept) < 12 * 8

    assert f"greedy: 12 of 12 prompts have kept samples in {tmp_path}" in arealite(*words)
    lines = stored_rows(sampled)
    assert lines[: len(kept)] == kept and len({line["prompt_id"] for line in lines}) == 12
    (row,) = metrics(tmp_path / "e" / "t")
    assert row["sampled/num_samples"] == len(lines) == 12 * 8 and row["sampled/num_failed"] == 0
    assert json.loads((tmp_path / "e" / "t" / "summary.json").read_text())["is_finished"] is True


@pytest.mark.long
def test_servers_that_run_already_are_asked(tmp_path: Path) -> None:
    model = write_tiny_model(out=tmp_path / "model", corpus=None, seed=1)
    server = LiteServer(AutoModelForCausalLM.from_pretrained(model), slots=32)
    words = [
        *(f"model.path={model}", f"cluster.fileroot={tmp_path}", f"valid_dataset.path={WORD_PROBLEMS}"),
        *("valid_dataset.max_rows=4", "gconfig.max_new_tokens=8", "gconfig.n_samples=3", "rollout.reward_workers=1"),
    ]
    with serve(server):
        words = ["eval", "--server", server.address, *words]
        assert "must describe itself as SGLang" in arealite(*words, status=1)
        arealite(*words, "rollout.backend=lite")
    (row,) = metrics(tmp_path / "evaluate" / "trial0")
    assert row["sampled/num_samples"] == 12 and {f"sampled/pass@{k}" for k in (1, 2, 3)} <= row.keys()
