"""Every ready-made trainer is run by the command, and a trainer of the user's own is run and replayed."""

from pathlib import Path

import pytest
from testing_runs import arealite, metrics

from arealite.cli.examples import TRAINERS, examples_folder

pytestmark = pytest.mark.slow

SMALL = "experiment_name=e trial_name=t total_train_steps=1 train_dataset.batch_size=4 valid_dataset=null"
SMALL += " train_dataset.max_rows=64 evaluator.freq_steps=null launcher.preflight=false"
EPISODES = "gconfig.n_samples=2 gconfig.max_new_tokens=8 lite.slots=8"
POLICY = "actor.path={model} " + EPISODES
KEYS = {
    "grpo": POLICY,
    "ppo": POLICY,
    "distill": POLICY + " teacher.path={model}",
    **dict.fromkeys(("sft", "dpo", "rw"), "model.path={model}"),
}


def test_every_trainer_is_run() -> None:
    assert {*TRAINERS} == {*KEYS, "eval", "null"}, "evaluation has a test of its own"


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=[] if one in ("sft", "dpo") else pytest.mark.long) for one in KEYS]
)
def test_a_ready_made_trainer_trains(kind: str, model: Path, tmp_path: Path) -> None:
    keys = [f"trainer.{kind}.{key}" for key in KEYS[kind].format(model=model).split()]
    arealite(f"trainer.type={kind}", *SMALL.split(), *keys, cwd=tmp_path)
    run = tmp_path / "runs" / "e" / "t"
    assert metrics(run)[0]["step"] == 0
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
    arealite("train", "--config", file, "trainer.type=mine:Mine", *words, cwd=tmp_path)
    told = arealite("replay", "runs/e/t", "--step", "0", cwd=tmp_path)
    assert "step 0 replayed: weights of version 1 are bit-identical" in told
