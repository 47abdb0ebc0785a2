import runpy
from pathlib import Path

import pytest

from arealite.api.cli_args import load_expr_config
from arealite.dataset import get_custom_dataset

EXAMPLES = Path(__file__).parents[2] / "examples"
POSTS = EXAMPLES / "quickstart" / "posts.py"


def test_posts_have_the_shape_of_the_data_set_and_splits_never_meet() -> None:
    names = runpy.run_path(str(POSTS))
    train, test = (names["rows"](split, seed=1, train="300", test=100) for split in ("train", "test"))
    assert (len(train), len(test)) == (300, 100) and train == names["rows"]("train", seed=1, train=300)
    assert {row["prompt"] for row in train}.isdisjoint(row["prompt"] for row in test)
    for row in train:
        assert row.keys() == {"prompt", "completion"}
        assert row["prompt"].startswith("SUBREDDIT: r/") and row["prompt"].endswith("\n\nTL;DR:")
        assert len(row["completion"]) < len(row["prompt"].partition("POST: ")[2])
    for pair in names["pairs"]("test", seed=1, test=20):
        assert pair.keys() == {"prompt", "chosen", "rejected"}
        assert pair["rejected"].strip() in names["FILLERS"] and pair["chosen"] != pair["rejected"]
    with pytest.raises(ValueError, match="split of the posts must be train or test: got 'valid'"):
        names["rows"]("valid", seed=1)


def test_the_example_reads_the_columns_of_the_hub() -> None:
    config_class = runpy.run_path(str(EXAMPLES / "arealite" / "tldr_grpo.py"))["TLDRConfig"]
    for name, source in (("tldr_grpo", "trl-lib/tldr"), ("tldr_grpo_cpu", "examples/quickstart/posts.py:rows")):
        file = EXAMPLES / "arealite" / "configs" / f"{name}.yaml"
        config = load_expr_config(["--config", str(file), "actor.path=m", "reward_model=r"], config_class)[0]
        assert (config.train_dataset.path, config.valid_dataset.path) == (source, source)
        assert (config.actor.algorithm, config.ref.path, config.reward) == ("grpo", "m", {})
        assert 0 < config.actor.overlong_buffer < config.gconfig.max_new_tokens and config.actor.kl_ctl > 0
    data = config.train_dataset
    keys = {"prompt_key": data.prompt_key, "answer_key": data.answer_key}
    (row,) = get_custom_dataset(f"{POSTS}:rows?train=1", type="rl", **keys)
    assert row["messages"] == [{"role": "user", "content": row["prompt"]}] and row["answer"] == row["completion"]
