"""A mixture has the shares that its weights ask for, meets every row, and names each prompt once."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing_metrics import undocumented

from arealite.api.cli_args import DatasetConfig, GRPOConfig, load_expr_config
from arealite.api.config.data import SourceConfig
from arealite.api.errors import ConfigError
from arealite.api.io_struct import PromptId
from arealite.dataset import load_datasets
from arealite.dataset.loader import Mixture, PromptLoader, names_of
from arealite.dataset.rows import Rows


def parts(*sizes: int) -> list[Rows]:
    return [
        Rows([{"source": part, "row": row} for row in range(size)], checksum=100 * part + size)
        for part, size in enumerate(sizes)
    ]


@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0.1, 0.5, 1, 2, 7])), min_size=1, max_size=3))
def test_a_source_gives_all_rows_before_it_gives_one_again(sources: list[tuple[int, float]]) -> None:
    sizes, weights = zip(*sources, strict=True)
    if min(weights) / sum(weights) * sum(sizes) < 1:
        return  # refused, see below
    mixture = Mixture(parts(*sizes), weights, seed=3)
    assert len(mixture) == sum(sizes)
    seen = Counter[tuple[int, int]]()
    for epoch in range(5):
        rows = [mixture.at(epoch, index) for index in range(len(mixture))]
        for part, weight in enumerate(weights):
            share = sum(row["source"] == part for row in rows)
            assert abs(share - len(mixture) * weight / sum(weights)) <= 1
            seen.update((part, row["row"]) for row in rows if row["source"] == part)
        for part, size in enumerate(sizes):
            counts = [seen[part, row] for row in range(size)]
            assert max(counts) - min(counts) <= 1


@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0.5, 1, 2])), min_size=1, max_size=4), st.booleans())
def test_the_source_of_an_index_is_that_of_its_row(sources: list[tuple[int, float]], is_weighted: bool) -> None:
    sizes, weights = zip(*sources, strict=True)
    if is_weighted and min(weights) / sum(weights) * sum(sizes) < 1:
        return
    names = [f"source-{part}" for part in range(len(sizes))]
    loader = PromptLoader(Mixture(parts(*sizes), weights if is_weighted else None, 3, names), 1)
    for epoch, index in itertools.product((0, 3), range(sum(sizes))):
        prompt_id = PromptId(epoch, index)
        assert loader.source_of(prompt_id) == names[loader.fetch(prompt_id)["source"]]


def test_a_prompt_of_no_mixture_has_no_source() -> None:
    assert PromptLoader(parts(3)[0], 1).source_of(PromptId(0, 1)) is None
    assert PromptLoader(Mixture(parts(3, 2), None, 1), 1).source_of(PromptId(-1, 0)) is None, "it was submitted"


def test_sources_have_names_for_metrics() -> None:
    paths = ["data/algebra-v1.2.jsonl", "org/math 500", "rows.py:made?train=2&test=1", "other/made.csv", "made_2", "/"]
    paths += ["hf-dataset://org/name/in/the.folder/easy.parquet", "données/été/"]
    first, *others = paths
    mixed = [SourceConfig(path=path) for path in others] + [SourceConfig(path="org/math 500", config_name="alg-1")]
    names = names_of(DatasetConfig(path=first, mixed_with=mixed))
    assert names == [
        "algebra_v1_2",
        "math_500",
        "made",
        "made_2",
        "made_2_2",
        "source",
        "easy",
        "été",
        "math_500_alg_1",
    ]
    assert undocumented({f"reward/mean/{name}" for name in names}) == set()


def test_without_weights_an_epoch_has_every_row_once() -> None:
    mixture = Mixture(parts(3, 2), None, seed=1)
    for epoch in (0, 4):
        rows = [mixture.at(epoch, index) for index in range(5)]
        assert [(row["source"], row["row"]) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert mixture[-1] == {"source": 1, "row": 1} and len(mixture[1:3]) == 2 and len([*mixture]) == 5


def test_a_prompt_is_fetched_as_it_was_yielded_also_after_a_resume() -> None:
    def loader() -> PromptLoader:
        return PromptLoader(Mixture(parts(5, 30), [1, 1], seed=2), 4, seed=2)

    stream = loader()
    first = list(itertools.islice(stream, 12))
    resumed = loader()
    resumed.load_state_dict(stream.state_dict())
    assert next(iter(resumed)) == next(iter(stream))
    rows = [row for batch in first for row in batch]
    assert len({row["prompt_id"] for row in rows}) == len(rows) and rows[-1]["prompt_id"].epoch == 1
    assert [loader().fetch(row["prompt_id"]) for row in rows] == rows
    mixture = stream.dataset
    expected = [mixture.at(row["prompt_id"].epoch, row["prompt_id"].index) for row in rows]
    assert [{key: row[key] for key in ("source", "row")} for row in rows] == expected
    assert [*mixture] != [mixture.at(1, index) for index in range(35)], "another half of the large source"
    assert resumed.fetch(PromptId(7, 34)) == loader().fetch(PromptId(7, 34))


@pytest.mark.parametrize(("saved", "ours"), [([1, 1], [1, 2]), (None, [1, 1]), ([1, 1], None)])
def test_a_resume_with_other_weights_is_refused(saved: list[float] | None, ours: list[float] | None) -> None:
    def loader(weights: list[float] | None) -> PromptLoader:
        return PromptLoader(Mixture(parts(5, 30), weights, seed=2), 4, seed=2)

    with pytest.raises(ConfigError, match=r"mixture must be .* Resume with the configuration"):
        loader(ours).load_state_dict(loader(saved).state_dict())
    with pytest.raises(ConfigError, match=r"mixture must be \d+, .*: got None"):
        PromptLoader([{"row": row} for row in range(35)], 4, seed=2).load_state_dict(loader(saved).state_dict())


def test_weights_and_sources_change_the_checksum() -> None:
    made = [Mixture(one, weights, 1) for one in (parts(4, 6), parts(6, 4)) for weights in (None, [1, 3], [2, 1])]
    assert len({mixture.checksum for mixture in made}) == 6
    assert made[1].checksum == Mixture(parts(4, 6), [2, 6], 1).checksum


def test_a_source_that_never_comes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"to an epoch of 6: got none of source 1 with the weights \[100, 1\]\. Raise"):
        Mixture(parts(4, 2), [100, 1], 1)


BLOCK = """
experiment_name: e
trial_name: t
tokenizer_path: t
actor: {path: none}
train_dataset:
  path: A
  weight: 3
  batch_size: 4
  system_prompt: Add.
  mixed_with: [{path: B, weight: 1, prompt_key: ask, answer_key: reply}]
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    for name, keys in (("A", ("question", "answer")), ("B", ("ask", "reply"))):
        lines = [json.dumps(dict(zip(keys, (f"{name}{n}", f"{n}"), strict=True))) for n in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    text = BLOCK.replace("path: A", f"path: {tmp_path}/A.jsonl").replace("path: B", f"path: {tmp_path}/B.jsonl")
    (tmp_path / "config.yaml").write_text(text)
    return lambda *more: load_expr_config(["--config", str(tmp_path / "config.yaml"), *more], GRPOConfig)[0]


def test_each_source_has_its_own_columns(load: Any, tokenizer: Any) -> None:
    train, valid = load_datasets(load("valid_dataset={}"), tokenizer)
    assert [row["answer"] for row in valid] == ["7"] and "question" in valid[0]
    rows = [*train]
    assert [("question" in row, "ask" in row) for row in rows] == [(True, False)] * 11 + [(False, True)] * 4
    asked = [(row["messages"][1]["content"], row["messages"][0]["content"], row["answer"]) for row in rows]
    assert {one[0][0] for one in asked[:11]} == {"A"} and {one[0] for one in asked[11:]} <= {f"B{n}" for n in range(8)}
    assert all(text[1:] == answer and system == "Add." for text, system, answer in asked)
    assert "A7" not in {one[0] for one in asked}, "held out"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            "train_dataset.weight=null",
            r"weight must be given in train_dataset and all its mixed_with, or nowhere: got \[None",
        ),
        ("train_dataset.shuffle=false", r"train_dataset\.shuffle must be true if sources have weights: got false"),
        ("train_dataset.image_key=image", r"mixed_with must be empty with image_key: got image_key image"),
        ("valid_dataset={path: x, weight: 2}", r"valid_dataset must be one source: got mixed_with or weight"),
        ("train_dataset.mixed_with=[{path: x, wieght: 2}]", "train_dataset.mixed_with.0.wieght must be left out: got"),
        ("train_dataset.mixed_with=[{weight: 2}]", r"train_dataset.mixed_with.0.path must be given: got "),
        ("train_dataset.mixed_with=[{path: x, weight: 0}]", r"mixed_with must be greater than 0: got 0"),
    ],
)
def test_what_is_no_mixture_is_refused(load: Any, change: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(change)
