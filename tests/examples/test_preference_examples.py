"""The examples that learn from pairs, run on a tiny model."""

import json
import math
from pathlib import Path
from typing import Any

import example_program
import pytest
import testing_forks
import yaml
from testing_quickstart import WORD_PROBLEMS, write_tiny_model

EXAMPLES = Path(__file__).parents[2] / "examples" / "arealite"
PAIRS = f"{WORD_PROBLEMS.removesuffix(':rows')}:pairs?train=64&test=16&steps=2"
pytestmark = pytest.mark.xdist_group("end_to_end")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(out=tmp_path_factory.mktemp("model"), corpus=None, seed=1)


def run(name: str, fileroot: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run an example with its CPU config and return the metrics of its steps."""
    file = EXAMPLES / "configs" / f"{name}_cpu.yaml"
    names = ("trial_name=t", f"cluster.fileroot={fileroot}", "recover.mode=disabled")
    argv = ["--config", str(file), *names, *overrides]
    with testing_forks.connected(example_program.main, EXAMPLES / f"{name}.py", argv) as fork:
        assert fork.end() == 0
    folder = fileroot / yaml.safe_load(file.read_text())["experiment_name"] / "t"
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_dpo_prefers_what_was_chosen_on_held_out_pairs_too(model: Path, tmp_path: Path) -> None:
    rows = run("dpo", tmp_path, f"model.path={model}", f"train_dataset.path={PAIRS}", "total_train_steps=6")
    assert rows[0]["dpo/loss"] == rows[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[6]["eval/accuracy"] == 1.0 and rows[6]["eval/loss"] < 0.6
    assert rows[5]["dpo/chosen_reward"] > rows[5]["dpo/rejected_reward"]
    assert (tmp_path / "dpo-cpu" / "t" / "checkpoints").is_dir()
