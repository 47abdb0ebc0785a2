"""Pictures to count, the configs that name them, and runs that learn from them."""

import runpy
from pathlib import Path

import pytest
from harness.processes import REPOSITORY
from testing_images import write_model
from testing_runs import launch, metrics

from arealite.api.cli_args import GRPOConfig, SFTConfig, load_expr_config
from arealite.dataset import load_datasets
from arealite.reward import load_rewards
from arealite.utils.hf import load_hf_tokenizer, load_image_processor
from arealite.utils.images import decode_image

EXAMPLES = REPOSITORY / "examples" / "arealite"
SHAPES = REPOSITORY / "examples" / "quickstart" / "shapes.py"


def test_a_picture_has_as_many_squares_as_its_answer_says() -> None:
    rows = runpy.run_path(str(SHAPES))["rows"]
    train, test = (rows(split, seed=1, train="200", test=100) for split in ("train", "test"))
    assert (len(train), len(test)) == (200, 100) and train == rows("train", seed=1, train=200)
    assert train[:100] != test and {row["answer"] for row in train} == {f"[{n}]" for n in range(1, 7)}
    for row in train[:20]:
        picture = decode_image(row["images"][0])
        coloured = sum(count for count, colour in picture.getcolors() if colour != (0, 0, 0))
        assert coloured == 100 * int(row["answer"].strip("[]"))
    with pytest.raises(ValueError, match="split of the shapes must be train or test: got 'valid'"):
        rows("valid", seed=1)


def test_the_configs_load_and_name_their_reward(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    for name, key in (("grpo", "actor.path"), ("sft", "model.path")):
        script = runpy.run_path(str(EXAMPLES / f"clevr_count_70k_{name}.py"))
        kind = {"grpo": script.get("CountingConfig"), "sft": SFTConfig}[name]
        for suffix in ("", "_cpu"):
            file = EXAMPLES / "configs" / f"clevr_count_70k_{name}{suffix}.yaml"
            config, _ = load_expr_config(["--config", str(file), f"{key}={path}"], kind)
            if name == "grpo":
                (reward,) = load_rewards(config.reward)
                assert (reward.__name__, reward("", "I see [4].", [], [], "4")) == ("clevr_count_70k_reward_fn", 1.0)
        config.train_dataset.max_rows = config.valid_dataset.max_rows = 4
        rows, _ = load_datasets(config, load_hf_tokenizer(path), load_image_processor(path))
        assert len(rows) == 4 and len(rows[0]["images"]) == 1
    config, _ = load_expr_config(["--config", str(EXAMPLES / "configs" / "geometry3k_grpo.yaml")], GRPOConfig)
    (reward,) = load_rewards(config.reward)
    assert reward("", r"So it is \boxed{2\sqrt{221}}.", [], [], r"2 \sqrt { 221 }") == 1.0


@pytest.mark.slow
def test_pictures_are_learned_from_then_rewarded(tmp_path: Path) -> None:
    """One step of each: through the launcher, the embedded server, and its saved model."""
    write_model(tmp_path / "model")
    keys = f"cluster.fileroot={tmp_path} trial_name=t total_train_steps=1 valid_dataset=null evaluator.freq_steps=null"
    keys += f" train_dataset.batch_size=4 train_dataset.path={SHAPES}:rows?train=8"
    run = {"sft": f"model.path={tmp_path}/model"}
    run["grpo"] = f"actor.path={tmp_path}/clevr-count-70k-sft-cpu/t/checkpoints/step_0 gconfig.n_samples=2 lite.slots=8"
    for name, more in run.items():
        script, config = EXAMPLES / f"clevr_count_70k_{name}.py", EXAMPLES / f"configs/clevr_count_70k_{name}_cpu.yaml"
        launch(script, config, *keys.split(), *more.split(), cwd=REPOSITORY)
    row = metrics(tmp_path / "clevr-count-70k-grpo-cpu" / "t")[0]
    assert row["rollout/accepted"] >= 4 and row["policy/canary_gap"] < 1e-4
    assert not any(value for key, value in row.items() if key.startswith("rollout/failed")), row
