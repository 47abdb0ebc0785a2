"""What a launcher looks at before it starts anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from testing_quickstart import make_tiny_model

from arealite.cli.check.check import check
from arealite.utils.devices import Gpu, Node, this_node

DOCS = Path(__file__).parents[3] / "docs"

ENTRY = """
import sys
if __name__ == "__main__":
    sys.exit("the script ran")  # before it imports for seconds

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.dataset import load_datasets
from arealite.dataset.loader import PromptLoader
from arealite.workflow.rlvr import RLVRWorkflow

def score(completions, answer, **kwargs):
    {body}

def main(argv):
    config, _ = load_expr_config(argv, GRPOConfig)
    rows, _ = load_datasets(config, None)
    PromptLoader(rows, 1)
    RLVRWorkflow(score, config.gconfig, None)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preflight")
    make_tiny_model(folder / "tiny", layers=1)
    config = {
        "experiment_name": "e",
        "trial_name": "t",
        "allocation_mode": "lite.d1+d1",
        "cluster": {"n_gpus_per_node": 0, "fileroot": str(folder / "runs")},
        "gconfig": {"n_samples": 2, "max_new_tokens": 8},
        "actor": {"path": str(folder / "tiny"), "dtype": "float32"},
        "train_dataset": {"path": str(folder / "rows.jsonl"), "batch_size": 4},
    }
    (folder / "c.yaml").write_text(json.dumps(config))
    (folder / "rows.jsonl").write_text("".join('{"question": "1 + 1?", "answer": "2"}\n' for _ in range(8)))
    return folder


def launch(
    folder: Path, *overrides: str, body: str = "return 1.0", launcher: str = "local", entry: str = ENTRY
) -> tuple[int, list[str]]:
    (folder / "train.py").write_text(entry.format(body=body))
    command = [sys.executable, "-m", f"arealite.launcher.{launcher}", str(folder / "train.py")]
    command += ["--config", str(folder / "c.yaml"), *overrides]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_problems_are_one_line_each(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text(ENTRY.format(body="return data"))
    words = ["--config", str(folder / "c.yaml"), "train_dataset.batch_size=9", "stats_logger.wandb.mode=online"]
    assert check(str(folder / "train.py"), words, preflight=this_node()) == 1
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("problem: outputs: stats_logger.wandb.mode must name a service whose package is installed")
    assert second.startswith("problem: data: batch_size must lie in 1..8, the rows of the dataset: got 9")


@pytest.mark.parametrize(
    ("gpu", "memory", "message"),
    [
        (None, 2**20, "problem: memory: the run needs about 0.00 of 0.0 GiB"),
        (None, 2**40, ""),
        ((2**40, 2**20), 2**40, "warning: memory: GPU 0 has 0.0 of 1024.0 GiB free. End what uses it"),
        ((2**20, 2**20), 2**40, "problem: memory: a trainer rank needs about 0.0"),
    ],
)
def test_what_no_device_holds_is_refused_and_what_others_use_is_a_warning(
    folder: Path, capfd: pytest.CaptureFixture[str], gpu: tuple[int, int] | None, memory: int, message: str
) -> None:
    (folder / "train.py").write_text(ENTRY.format(body="return 1.0"))
    node = Node(() if gpu is None else (Gpu("0", *gpu),), memory, memory)
    words = ["--config", str(folder / "c.yaml"), f"cluster.n_gpus_per_node={len(node.gpus)}"]
    words += ["allocation_mode=d1", "rollout.server_addrs=a:1"] if gpu else []
    assert check(str(folder / "train.py"), words, preflight=node) == message.startswith("problem")
    shown = capfd.readouterr().err
    assert message in shown and (message or "memory" not in shown)


def test_completions_are_no_longer_than_the_context_in_the_plan(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(ENTRY.format(body="return 1.0"))
    words = ["--config", str(folder / "c.yaml"), "gconfig.max_new_tokens=8000", "lite.context=16384"]
    words.append("actor.mb_spec.max_tokens_per_mb=null")
    node = Node((), 2**26, 2**26)
    assert check(str(folder / "train.py"), words, preflight=node) == 0
    shown = capfd.readouterr().err
    assert "completions are cut before gconfig.max_new_tokens" in shown and "memory" not in shown


@pytest.mark.long
@pytest.mark.slow
def test_torchruns_commands_come_after_a_call_of_the_reward_with_the_first_row(folder: Path) -> None:
    status, lines = launch(folder, body="return data", launcher="torchrun")
    assert status == 2
    assert lines[0] == "checking model, data and reward (launcher.preflight=false skips it)"
    assert lines[-1] == "ConfigError: the problems above must be solved: nothing was started."
    assert not [*(folder / "runs").rglob(".secret")]
    place = f"{folder}/train.py"
    assert lines[1:-1] == [
        f"problem: reward: reward function score at {place}:11 in score must not raise: got NameError: name 'data' is "
        f"not defined, at {place}:12 in score."
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def own(completions, **kwargs):\n    return data", "must not raise: got NameError: name 'data' is not"),
        ("def own(completions, **kwargs) -> list[float]: ...", "must score one completion: got own"),
    ],
)
def test_rewards_that_the_config_names_are_called(
    tmp_path: Path, folder: Path, body: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The check itself; that a launcher starts it, and obeys its status, is tested above."""
    own = tmp_path / f"{tmp_path.name}.py"  # a process knows one file of a name
    own.write_text(body)
    script = tmp_path / "train.py"
    script.write_text(
        ENTRY.replace("RLVRWorkflow(score,", "RLVRWorkflow(load_rewards(config.reward),").format(body="pass")
    )
    several = f"reward={{{own}:own: 1.0, arealite.reward:gsm8k_reward_fn: 0.5}}"
    assert check(str(script), ["--config", str(folder / "c.yaml"), several], preflight=this_node()) == 1
    shown = capfd.readouterr()
    (line,) = (shown.out + shown.err).splitlines()
    assert line.startswith("problem: reward: ") and message in line


@pytest.mark.parametrize("override", ["launcher.preflight=true", "launcher.preflight=false"])
@pytest.mark.slow
def test_a_run_without_problems_starts(folder: Path, override: str) -> None:
    """Also one with a warning, and one whose check does not come to its end."""
    body = "import os; os._exit(7)"
    if override.endswith("true"):
        body = "raise ConnectionError('the judge is not up yet')"
    status, lines = launch(folder, override, "allocation_mode=d1", "rollout.server_addrs=[127.0.0.1:9]", body=body)
    assert status == 1 and "the script ran" in lines
    assert ("warning: reward: " in "\n".join(lines)) == override.endswith("true")


@pytest.mark.long
@pytest.mark.slow
def test_a_check_that_dies_does_not_stop_a_run(folder: Path) -> None:
    arguments = ("allocation_mode=d1", "rollout.server_addrs=[127.0.0.1:9]")
    status, lines = launch(folder, *arguments, body="import os; os._exit(7)")
    assert status == 1 and "the script ran" in lines
    assert "the check ended with exit status 7: the run starts without it" in lines
