"""What the examples of agents bring of their own: rules, a corpus, a lake."""

import sys
from collections import deque
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from testing_chat_templates import real_tokenizer
from testing_conversations import SayingEngine, call

from arealite.api.cli_args import GenerationHyperparameters, GRPOConfig, load_expr_config
from arealite.rollout.trajectory import check_trajectory

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "agents"))
import countdown_problems as countdown
import frozen_lake
import search

EXAMPLES = Path(countdown.__file__).parent
GCONFIG = GenerationHyperparameters()


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(1 + 2) * 3 - 4", 5),
        ("4 / 3 * (2 - 1)", Fraction(4, 3)),
        ("1 + 2 + 3", "each number must be used once"),
        ("1 + 2 * 3 - 4 + 4", "each number must be used once"),
        ("4 / (3 - 1 - 2)", "it has no value"),
        ("2 ** 3 - 4 + 1", "only"),
        ("__import__('os')", "only"),
        ("(1 +", "it has no value"),
    ],
)
def test_countdown_evaluates_only_what_its_rules_allow(expression: str, value: Any) -> None:
    if isinstance(value, str):
        with pytest.raises(ValueError, match=value):
            countdown.evaluate(expression, [1, 2, 3, 4])
    else:
        assert countdown.evaluate(expression, [1, 2, 3, 4]) == value


def test_countdown_problems_can_be_solved_and_splits_differ() -> None:
    rows, others = countdown.rows("train", seed=1, train=50), countdown.rows("test", seed=1, test=50)
    assert len(rows) == 50 and rows == countdown.rows("train", seed=1, train=50) != others
    row = next(row for row in rows if len(row["numbers"]) == 3)
    wrong = countdown.score("<answer>" + " + ".join(map(str, row["numbers"])) + "</answer>", **row)
    assert wrong in (0.1, 1.0) and countdown.score("no", **row) == 0.0
    assert countdown.score("<answer>1 + 2</answer>", [1, 2], 3) == 1.0


@pytest.mark.parametrize("file", sorted((EXAMPLES / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_configs_load(file: Path) -> None:
    given = {"cpu": ["actor.path=m", "train_dataset.path=d"], "online": ["actor.path=m"]}.get(file.stem, [])
    config, _ = load_expr_config(["--config", str(file), *given], GRPOConfig)
    assert config.gconfig.n_samples > 1 and (config.actor.baseline, config.actor.reward_scale) == (
        "group_mean",
        "group_std",
    )
    data = config.train_dataset.path.partition(":")[0]
    assert data in ("d", "openai/gsm8k") or (EXAMPLES.parents[1] / data).is_file()


async def test_two_searches_find_the_city() -> None:
    (row,) = search.rows("train", seed=1, train=1)
    name, _, friend = next(one for one in search.people() if one[0] in row["messages"][0]["content"])
    said = [call("search", query=name), call("search", query=friend), f"In {row['city']}."]
    engine = SayingEngine(real_tokenizer("Qwen2.5"), lambda text: said[text.count("assistant\n") - 1])
    workflow = search.make_workflow(None, GCONFIG, engine.tokenizer)
    run = check_trajectory(await workflow.arun_episode(engine, row), head_version=0)
    workflow.close()
    assert run["rewards"].tolist() == [1.0] and run["tool_calls"].tolist() == [2]
    assert f"{friend} lives in {row['city']}." in engine.tokenizer.decode(run[0]["input_ids"])


def shortest_way(lake: str) -> str:
    """Return the first move of the shortest way over the lake."""
    lines = lake.split("\n")
    places = {(x, y): field for y, line in enumerate(lines) for x, field in enumerate(line)}
    start = next(place for place, field in places.items() if field == "P")
    queue, seen = deque([(start, "")]), {start}
    while queue:
        (x, y), first = queue.popleft()
        if places[x, y] == "G":
            return first
        for name, step in {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}.items():
            place = (x + step[0], y + step[1])
            if place not in seen and places.get(place, "O") != "O":
                seen.add(place)
                queue.append((place, first or name))
    raise AssertionError(f"no way over {lake}")


async def test_who_knows_the_way_crosses_the_lake() -> None:
    def says(text: str) -> str:
        return f"I go {shortest_way(text.rpartition('up or down.')[2].partition('<')[0].strip())}."

    engine = SayingEngine(real_tokenizer("Qwen2.5"), says)
    workflow = frozen_lake.make_workflow(None, GCONFIG, engine.tokenizer)
    for row in frozen_lake.rows("train", seed=1, train=3):
        run = check_trajectory(await workflow.arun_episode(engine, row), head_version=0)
        assert run["rewards"].tolist() == [1.0] and run["is_terminated"].tolist() == [1] and run["num_turns"][0] >= 6
    workflow.close()
