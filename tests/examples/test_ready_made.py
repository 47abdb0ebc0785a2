"""Every ready-made trainer is run by the command, and a trainer of the user's own is run and replayed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from testing_quickstart import write_tiny_model

from arealite.cli.examples import TRAINERS, examples_folder

REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

SMALL = "experiment_name=e trial_name=t total_train_steps=1 train_dataset.batch_size=4 valid_dataset=null"
SMALL += " evaluator.freq_steps=null launcher.preflight=false"
EPISODES = "gconfig.n_samples=2 gconfig.max_new_tokens=8 lite.slots=8"
POLICY = "actor.path={model} " + EPISODES
KEYS = {
    "grpo": POLICY,
    "ppo": POLICY,
    "distill": POLICY + " teacher.path={model}",
    **dict.fromkeys(("sft", "dpo", "rw"), "model.path={model}"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(out=tmp_path_factory.mktemp("model"), corpus=None, seed=1)


def arealite(folder: Path, *words: str) -> str:
    """Run a command in a folder that is no checkout, on a node without GPUs, and return what it prints."""
    command = [sys.executable, "-m", "arealite.cli.main", *words]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.parametrize("kind", [kind for kind in TRAINERS if kind != "null"])  # test_evaluation_example.py
def test_a_ready_made_trainer_trains(kind: str, model: Path, tmp_path: Path) -> None:
    keys = [f"trainer.{kind}.{key}" for key in KEYS[kind].format(model=model).split()]
    arealite(tmp_path, f"trainer.type={kind}", *SMALL.split(), *keys)
    run = tmp_path / "runs" / "e" / "t"
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["step"] == 0
    assert (run / "checkpoints" / "step_0" / "model.safetensors").is_file()


OWN = """

class Mine:
    config_class = GRPOConfig

    def __init__(self, config):
        self.config = config

    def train(self):
        main(self.config)
"""


def test_a_loop_in_a_class_of_ones_own_is_replayed(model: Path, tmp_path: Path) -> None:
    loop = (examples_folder() / "arealite" / "gsm8k_grpo.py").read_text()
    loop = loop.replace("    config, _ = load_expr_config(argv, GRPOConfig)\n", "    config = argv\n")
    (tmp_path / "mine.py").write_text(loop + OWN)
    file = str(examples_folder() / "arealite" / "configs" / "gsm8k_grpo_cpu.yaml")
    data = f"train_dataset.path={examples_folder()}/quickstart/word_problems.py:rows"
    keys = [f"trainer.Mine.{key}" for key in KEYS["grpo"].format(model=model).split()]
    words = (*SMALL.split(), *keys, data, "actor.reward_bias=-0.5", "actor.reward_scale=none", "actor.baseline=none")
    arealite(tmp_path, "train", "--config", file, "trainer.type=mine:Mine", *words)
    told = arealite(tmp_path, "replay", "runs/e/t", "--step", "0")
    assert "step 0 replayed: weights of version 1 are bit-identical" in told
