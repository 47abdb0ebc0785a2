"""Programming tasks and the runs that train on them: solutions earn their reward in the real sandbox."""

import json
import runpy
from pathlib import Path

import pytest
from harness.processes import REPOSITORY
from testing_quickstart import write_tiny_model
from testing_runs import launch, metrics

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.dataset import get_custom_dataset
from arealite.reward import load_rewards
from arealite.reward.code import code_reward, judge
from arealite.reward.sandbox import Sandbox

CONFIGS = REPOSITORY / "examples" / "arealite" / "configs"
PROGRAMS = REPOSITORY / "examples" / "quickstart" / "programs.py"
MBPP = {
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\r\n    return a + b",
    "test_setup_code": "import math",
    "test_list": ["assert add(1, 2) == 3", "assert add(math.inf, 2) == math.inf"],
}


def test_solutions_pass_their_tests_and_splits_never_meet() -> None:
    rows = runpy.run_path(str(PROGRAMS))["rows"]
    train, test = (rows(split, seed=1, train="300", test=100) for split in ("train", "test"))
    assert (len(train), len(test)) == (300, 100) and train == rows("train", seed=1, train=300)
    assert {row["question"] for row in train}.isdisjoint(row["question"] for row in test)
    by_task = {row["question"].partition(",")[0]: row for row in train}
    assert len(by_task) == 8
    for row in list(by_task.values())[::3]:
        assert all(one.is_passed for one in judge(row["solution"], row["tests"], sandbox=Sandbox(isolation="process")))
    with pytest.raises(ValueError, match="split of the programs must be train or test: got 'valid'"):
        rows("valid", seed=1)


def test_the_configs_name_the_reward_and_its_tests(tmp_path: Path) -> None:
    for name in ("code_grpo", "code_grpo_cpu"):
        config, _ = load_expr_config(["--config", str(CONFIGS / f"{name}.yaml"), "actor.path=m"], GRPOConfig)
        assert load_rewards(config.reward) == {code_reward: 1.0} and config.train_dataset.answer_key == "tests"
    (tmp_path / "train.jsonl").write_text(json.dumps(MBPP) + "\n")
    (row,) = get_custom_dataset(f"{PROGRAMS}:mbpp?path={tmp_path}", type="rl", answer_key="tests")
    assert row["messages"][0]["content"].endswith("this test:\nassert add(1, 2) == 3")
    verdicts = judge(MBPP["code"], row["answer"], sandbox=Sandbox(isolation="process"))
    assert [one.is_passed for one in verdicts] == [True, True]


@pytest.mark.slow
def test_a_run_rewards_programs_by_their_tests(tmp_path: Path) -> None:
    """A model of random weights writes none, which is a reward of 0 and no failure."""
    write_tiny_model(out=tmp_path / "model", corpus=None, seed=1)
    keys = f"actor.path={tmp_path}/model cluster.fileroot={tmp_path} trial_name=t total_train_steps=1"
    keys += " valid_dataset=null evaluator.freq_steps=null"
    keys += " train_dataset.batch_size=4 gconfig.n_samples=2 gconfig.max_new_tokens=8 lite.slots=8"
    launch(CONFIGS.parent / "gsm8k_grpo.py", CONFIGS / "code_grpo_cpu.yaml", *keys.split(), cwd=REPOSITORY)
    row = metrics(tmp_path / "code-grpo-cpu" / "t")[0]
    assert row["reward/mean"] == 0 and row["rollout/accepted"] >= 4
    assert not any(value for key, value in row.items() if key.startswith("rollout/failed")), row
