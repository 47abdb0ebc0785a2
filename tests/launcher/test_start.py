"""A script that is run by hand is started by the launcher that `mode` names, and does its work there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from arealite.cli.check.findings import Findings
from arealite.cli.check.script import check_declared
from arealite.launcher import local
from arealite.launcher.start import launched

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import os, pathlib, sys
from arealite.api.cli_args import SFTConfig, load_expr_config
from arealite.launcher.start import launched

def main(argv):
    config, file = load_expr_config(argv, SFTConfig)
    message = f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {config.trial_name} {config.mode} by {file}"
    pathlib.Path(config.cluster.fileroot, "message").write_text(message)
    if config.seed == 7:
        sys.exit(7)

if __name__ == "__main__":
    sys.exit(launched(__file__, main))
"""
GRAPH = """
import sys
if __name__ == "__main__":
    sys.exit("it must only be imported")

from arealite.core.graph import MFC, DataFlowGraph
from arealite.launcher.start import launched

class Engine:
    def train(self, batch): ...

def fits(argv):
    calls = [
        MFC("data", "data", "generate", outputs=("input_ids", "loss_mask")),
        MFC("train", "model", "train_step", Engine.train, ("input_ids", "los_mask", "loss_mask")),
    ]
    DataFlowGraph(calls, {"model": Engine}, publishes="model")

def main():
    launched(__file__, fits, check=fits)
"""
CONFIG = """
experiment_name: e
trial_name: ???
allocation_mode: d1
cluster: {n_gpus_per_node: 0, fileroot: .}
model: {path: org/name}
train_dataset: {path: none.jsonl}
launcher: {preflight: false}
"""
DOCUMENTED = """
defaults:
  - _self_

experiment_name: ppo-math
trial_name: ???
mode: ray
allocation_mode:
  actor_train:
    placement_group:
      strategy: STRICT_PACK
      bundles:
        - GPU: 8
  actor_gen:
    placement_group:
      strategy: SPREAD
      bundles:
        - GPU: 2
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a script with its config beside it, in the working folder."""
    for name in ("RANK", "AREAL_LLM_SERVER_ADDRS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "sync-sft.yaml").write_text(CONFIG)
    path = tmp_path / "main_sync_sft.py"
    path.write_text(SCRIPT)
    return path


def by_hand(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, script.name, *words]
    return subprocess.run(command, cwd=script.parent, env=env, capture_output=True, text=True, timeout=600, check=False)


def test_a_script_starts_its_launcher_works_there_and_ends_by_its_status(script: Path) -> None:
    run = by_hand(script, "trial_name=t", "seed=7")
    assert run.returncode == 7, run.stdout + run.stderr
    config = script.parent / "configs" / "sync-sft.yaml"
    assert (script.parent / "message").read_text() == f"0 of 1: t local by {config}"
    assert (script.parent / "e" / "t" / "logs" / "trainer-0.log").is_file()


def refuse(argv: list[str]) -> None:
    raise AssertionError(f"this process is no rank: {argv}")


def test_a_dry_run_starts_nothing(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launched(str(script), refuse, ["--dry-run", "trial_name=t"]) == 0
    message = capsys.readouterr().out
    assert (
        message.startswith("e/t: d1 on 1 node, CPUs only (local)\n") and "trainer-0      log trainer-0.log" in message
    )
    other = script.parent / "other.yaml"
    other.write_text(CONFIG.replace("???", "other"))
    for mode, name in {"ray": "Ray", "slurm": "Slurm"}.items():
        assert launched(str(script), refuse, [f"--config={other}", "--dry-run", f"mode={mode}"]) == 0
        assert capsys.readouterr().out.startswith(f"e/other: d1 on 1 node, CPUs only ({name})\n")


def test_a_graph_that_can_not_be_is_refused_by_the_launcher_itself(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before it prints a plan, whether the script or the launcher's own command line is called."""
    script.write_text(GRAPH)
    words = ["trial_name=t", "--dry-run", "workers={}"]
    assert launched(str(script), refuse, [*words, "launcher.preflight=true"]) == 2
    given = [str(script), "--config", str(script.parent / "configs" / "sync-sft.yaml"), *words]
    assert local.main([*given, "launcher.preflight=false"]) == 0
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "checking what the script declares (launcher.preflight=false skips it)",
        "problem: graph: an input must be made by a call: got los_mask of train. Did you mean loss_mask?",
        "ConfigError: the problems above must be solved: nothing was started.",
    ]
    assert not (script.parent / "e").exists()


def test_a_script_of_a_master_must_have_workers(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its launcher refuses it, by what it imports, before servers start."""
    script.write_text("from arealite.core.workers import Workers\n" + script.read_text())
    assert launched(str(script), refuse, ["--dry-run", "trial_name=t"]) == 2
    message = "workers must be given to a script of a master: got nothing. Add `workers: {}`."
    assert capsys.readouterr().err == f"ConfigError: {message}\n"
    assert launched(str(script), refuse, ["--dry-run", "trial_name=t", "workers={}"]) == 0


def test_mode_may_stand_in_the_config(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script.parent / "configs" / "main_sync_sft.yaml").write_text(CONFIG + "mode: ray\n")
    assert launched(str(script), refuse, ["--dry-run", "trial_name=t"]) == 0
    assert "(Ray)" in capsys.readouterr().out
    assert launched(str(script), refuse, ["--dry-run", "trial_name=t", "mode=local"]) == 0
    assert "(local)" in capsys.readouterr().out


def test_a_rank_and_help_are_the_scripts_own(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[str]] = []
    assert launched(str(script), taken.append, ["--help"]) == 0
    monkeypatch.setenv("RANK", "0")
    assert launched(str(script), taken.append, ["--config", "c", "a=b"]) == 0
    assert taken == [["--help"], ["--config", "c", "a=b"]]


def test_what_is_refused(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launched(str(script), refuse, ["mode=torchrun"]) == 2
    message = "ConfigError: mode must be local, ray or slurm: got torchrun. Correct it.\n"
    assert capsys.readouterr().err == message
    (script.parent / "configs" / "sync-sft.yaml").unlink()
    assert launched(str(script), refuse, ["trial_name=t"]) == 2
    configs = script.parent / "configs"
    assert capsys.readouterr().err.startswith(
        f"ConfigError: --config must be given without {configs / 'main_sync_sft.yaml'} or "
        f"{configs / 'sync-sft.yaml'}: got no file. Add --config FILE.yaml.\n"
    )


def test_the_yaml_of_the_originals_core_is_planned(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of a placement group per call, with the command line that goes with it, and the size of a batch."""
    config = script.parent / "configs" / "documented.yaml"
    config.write_text(DOCUMENTED)
    given = ["experiment_name=my_experiment", "trial_name=my_trial", "actor.path=Qwen/Qwen3-1.7B", "cluster.n_nodes=4"]
    words = [f"--config={config}", *given, "dataset.path=path/to/dataset", "dataset.train_bs_n_seqs=128"]
    program = REPOSITORY / "training" / "main_sync_ppo.py"
    assert launched(str(program), refuse, [*words, "--dry-run", "launcher.preflight=false"]) == 0
    lines = re.sub(r"actor: .*\n", "", capsys.readouterr().out).splitlines()
    assert lines[: lines.index("server-0 runs")] == [
        "my_experiment/my_trial: sglang.d2p1t1+d8p1t1 on 4 nodes, 8 GPUs each (Ray)",
        f"run folder: {script.parent}/runs/my_experiment/my_trial",
        "node 0",
        "  server-0       GPU 0     log server-0.log",
        "  server-1       GPU 1     log server-1.log",
        "  trainer-0      log trainer-0.log",
        "workers of trainer-0, on nodes that Ray chooses",
        "  actor-{0-7}    8 GPUs, 4 threads each, STRICT_PACK, for actor, critic  log actor-{0-7}.log",
        "22 of 32 GPUs stay idle",
    ]
    declared: Any = check_declared(Findings(), words, program)
    keys = "input_ids, attention_mask, pixel_values?, image_grid_thw?, kept_ids?, kept_counts?, loss_mask, logprobs, "
    keys += "versions, rewards, no_eos?, group_index, sample_index?, turn_rewards?"
    assert re.sub(r"\n {6}", " ", str(declared.graph)).splitlines() == [
        "calls of a step",
        f"  actor_gen (rollout): -> {keys}",
        "  critic_inf (critic): input_ids, attention_mask -> values",
        f"  advantages (actor): {keys}, values -> advantages, whole_logprobs?, returns, returns_mask",
        f"  actor_train (actor): {keys}, values, advantages, whole_logprobs? -> weights",
        "  critic_train (critic): input_ids, attention_mask, group_index, values, returns, returns_mask -> weights",
    ]
