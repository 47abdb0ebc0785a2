"""The examples that learn from pairs, from a teacher and from a reward model, run on tiny models."""

import math
from pathlib import Path
from typing import Any

import example_program
import pytest
import testing_forks
import tiny_models
import yaml
from testing_lite import LiteServer
from testing_quickstart import WORD_PROBLEMS
from testing_rollouts import stored_rows
from testing_runs import metrics
from testing_server import serve
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from arealite.dataset import get_custom_dataset
from arealite.engine.rw.reward_model import RewardModel
from arealite.utils.hf import load_hf_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples" / "arealite"
PAIRS = f"{WORD_PROBLEMS.removesuffix(':rows')}:pairs?train=64&test=16&steps=2"
POSTS = EXAMPLES.parent / "quickstart" / "posts.py"
pytestmark = pytest.mark.slow


def run(name: str, fileroot: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run an example with its CPU config and return the metrics of its steps."""
    file = EXAMPLES / "configs" / f"{name}_cpu.yaml"
    names = ("trial_name=t", f"cluster.fileroot={fileroot}", "recover.mode=disabled")
    argv = ["--config", str(file), *names, *overrides]
    with testing_forks.connected(example_program.main, EXAMPLES / f"{name}.py", argv) as fork:
        assert fork.end() == 0
    return metrics(fileroot / yaml.safe_load(file.read_text())["experiment_name"] / "t")


@pytest.mark.parametrize(
    "lora", ["model.lora=null", pytest.param("model.lora={rank: 8, alpha: 64}", marks=pytest.mark.long)]
)
def test_dpo_prefers_what_was_chosen_on_held_out_pairs_too(model: Path, tmp_path: Path, lora: str) -> None:
    rows = run("dpo", tmp_path, f"model.path={model}", f"train_dataset.path={PAIRS}", "total_train_steps=6", lora)
    assert rows[0]["dpo/loss"] == rows[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[6]["eval/accuracy"] == 1.0 and rows[6]["eval/loss"] < 0.6
    assert rows[5]["dpo/chosen_reward"] > rows[5]["dpo/rejected_reward"]
    assert (tmp_path / "dpo-cpu" / "t" / "checkpoints").is_dir()


@pytest.mark.long
def test_a_reward_model_scores_held_out_pairs_rightly(model: Path, tmp_path: Path) -> None:
    rows = run("reward_model", tmp_path, f"model.path={model}", f"train_dataset.path={PAIRS}", "total_train_steps=6")
    assert rows[0]["rw/loss"] == rows[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[6]["eval/accuracy"] == 1.0 and rows[6]["eval/loss"] < 0.6
    tokenizer = load_hf_tokenizer(model)
    judge = RewardModel(str(tmp_path / "reward-model-cpu" / "t" / "checkpoints" / "step_5"), tokenizer, dtype="float32")
    held_out = get_custom_dataset(PAIRS, type="rw", split="test", tokenizer=tokenizer)
    scores = judge.score([one["input_ids"] for row in held_out for one in row["pair"]])
    assert all(chosen > rejected for chosen, rejected in zip(scores[0::2], scores[1::2], strict=True))
    margin = sum(scores[0::2]) - sum(scores[1::2])
    assert margin / len(held_out) == pytest.approx(rows[6]["eval/margin"], rel=1e-3)


JUDGE = """
from arealite.engine.rw.reward_model import RewardModel
from arealite.utils.hf import load_hf_tokenizer

judge = RewardModel({path!r}, load_hf_tokenizer({path!r}), dtype="float32")
"""


@pytest.mark.long
def test_a_reward_model_is_the_reward_of_a_run(tmp_path: Path) -> None:
    policy, path = tiny_models.save_qwen3(tmp_path / "policy", seed=0), str(tmp_path / "rewards")
    options = {"num_labels": 1, "dtype": "float32"}
    AutoModelForSequenceClassification.from_pretrained(policy, **options).save_pretrained(path)
    tiny_models.tokenizer().save_pretrained(path)
    (tmp_path / "judging.py").write_text(JUDGE.format(path=path))
    server = LiteServer(AutoModelForCausalLM.from_pretrained(policy), slots=32)
    with serve(server):
        first, _ = run(
            *("gsm8k_grpo", tmp_path, f"actor.path={policy}", f"reward={tmp_path / 'judging.py'}:judge"),
            *(f"rollout.server_addrs={server.address}", "rollout.weight_update=disk", "gconfig.max_new_tokens=8"),
            *(f"train_dataset.path={WORD_PROBLEMS}?train=16&test=2&steps=1", "train_dataset.batch_size=4"),
            *("total_train_steps=1", "gconfig.n_samples=4", "valid_dataset=null", "evaluator.freq_steps=null"),
        )
    samples = stored_rows(tmp_path / "gsm8k-grpo-cpu" / "t" / "rollouts" / "step_0")
    scores = RewardModel(path, tiny_models.tokenizer(), dtype="float32").score([one["input_ids"] for one in samples])
    assert [one["reward"] for one in samples] == pytest.approx(scores, abs=1e-4)
    assert first["reward/mean"] == pytest.approx(sum(scores) / 16, abs=1e-4) and first["reward/std"] > 0


@pytest.mark.long
def test_summaries_come_to_please_a_reward_model_that_pairs_have_taught(model: Path, tmp_path: Path) -> None:
    """Both stages, on posts with the columns of the hub's: scores rise, those of held-out posts too."""
    pairs = f"{POSTS}:pairs?train=64&test=16"
    judged = run("reward_model", tmp_path, f"model.path={model}", f"train_dataset.path={pairs}", "total_train_steps=8")
    assert judged[-1]["eval/accuracy"] == 1.0
    judge = tmp_path / "reward-model-cpu" / "t" / "checkpoints" / "step_7"
    server = LiteServer(AutoModelForCausalLM.from_pretrained(model), slots=32)
    with serve(server):
        rows = run(
            *("tldr_grpo", tmp_path, f"actor.path={model}", f"reward_model={judge}", "total_train_steps=8"),
            *(f"rollout.server_addrs={server.address}", "rollout.weight_update=disk", "evaluator.freq_steps=8"),
            *(f"train_dataset.path={POSTS}:rows?train=64&test=8", "actor.optimizer.lr=5e-3", "async_training=false"),
            *("gconfig.max_new_tokens=16", "actor.kl_ctl=0.01"),
        )
    rewards = [row["reward/mean"] for row in rows[:8]]
    assert sum(rewards[4:]) / 4 > rewards[0] and rows[8]["eval/reward"] > rows[0]["eval/reward"] + 0.02, rows
    assert rows[0]["policy/ref_kl"] < 1e-6 < rows[7]["policy/ref_kl"]
    samples = stored_rows(tmp_path / "tldr-grpo-cpu/t/rollouts/step_0")
    scores = RewardModel(str(judge), load_hf_tokenizer(model), dtype="float32").score(
        [one["input_ids"] for one in samples]
    )
    assert [one["reward"] for one in samples] == pytest.approx(scores, abs=1e-4)
    prompts = [one["segments"][0]["given"] for one in samples]
    assert all("SUBREDDIT: r/" in prompt and "TL;DR:" in prompt for prompt in prompts)


@pytest.mark.long
def test_distillation_comes_nearer_to_the_teacher(tmp_path: Path) -> None:
    student, teacher = (tiny_models.save_qwen3(tmp_path / f"model{seed}", seed=seed) for seed in (0, 1))
    server = LiteServer(AutoModelForCausalLM.from_pretrained(student), slots=32)
    with serve(server):
        rows = run(
            *("distill", tmp_path, f"actor.path={student}", f"teacher.path={teacher}", "total_train_steps=5"),
            *(f"rollout.server_addrs={server.address}", "rollout.weight_update=disk", "gconfig.max_new_tokens=8"),
            *(f"train_dataset.path={WORD_PROBLEMS}?train=64&test=2&steps=1", "train_dataset.batch_size=16"),
            *("actor.optimizer.lr=1e-2", "async_training=false"),
        )
    kl = [row["policy/teacher_kl"] for row in rows[:5]]
    assert kl[0] > 0.5 and kl[4] < 0.8 * kl[0], kl
