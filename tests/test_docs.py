"""What pages tell to type, typed: their files written, their commands run, in an empty folder."""

import asyncio
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import testing_runs
from testing_rollouts import stored_rows

from arealite.api.cli_args import DatasetConfig
from arealite.api.errors import ParseError
from arealite.workflow.tools import FunctionTools

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "docs" / "data-and-rewards.md").read_text()


def typed(page: str, folder: Path, examples: str) -> Path:
    """Write the files of a page into a folder, run its commands there, and return it."""
    for name, body in re.findall(r"```python\n# (\S+)\n(.*?)```", page, re.DOTALL):
        (folder / name).write_text(body)
    for commands in re.findall(r"```sh\n(.*?)```", page, re.DOTALL):
        testing_runs.typed(commands, folder, folder / "bin", E=str(REPOSITORY / "examples" / examples))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which everything was typed."""
    return typed(PAGE, tmp_path_factory.mktemp("empty"), "arealite")


def metrics(folder: Path, trial: str, *own: str) -> list[dict[str, Any]]:
    return testing_runs.metrics(folder / "runs/own" / trial, own)


@pytest.mark.long
@pytest.mark.slow
def test_own_columns_and_weighted_rewards(folder: Path) -> None:
    rows = metrics(folder, "first")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[:2]:
        weighted = row["rewards/correct"] + 0.1 * row["rewards/brief"]
        assert row["reward/mean"] == pytest.approx(weighted, abs=1e-6)
        assert row["rewards/brief"] == pytest.approx(-row["rollout/completion_tokens"] / 100, abs=1e-6)
    assert rows[0]["eval/rewards/brief"] < 0 and rows[0]["eval/num_samples"] == 5

    def numbers(pattern: str) -> set[int]:
        """Return the n of the rows that were sampled."""
        found = (folder / "runs/own/first/rollouts").glob(pattern)
        prompts = {row["segments"][0]["given"] for path in found for row in stored_rows(path)}
        asked = re.compile(r"<\|user\|>Tom has (\d+) .* How many\? Think\.<\|end\|><\|assistant\|>")
        matches = [asked.fullmatch(prompt) for prompt in prompts]
        return {int(match[1]) for match in matches if match is not None}

    assert numbers("eval_step_*") == {*range(95, 100)}, "the last rows"
    assert len(trained := numbers("step_*")) == 16 and max(trained) < 95


@pytest.mark.long
@pytest.mark.slow
def test_conversations_are_learned(folder: Path) -> None:
    assert [row["step"] for row in metrics(folder, "chats")] == [0, 1, 2]


@pytest.mark.long
@pytest.mark.slow
def test_a_second_turn_follows_a_wrong_answer(folder: Path) -> None:
    first, last = metrics(folder, "turns")
    assert first["workflow/num_turns"] == last["eval/num_turns"] == 2, "random weights answer nothing right"
    again = re.compile(
        r"<\|user\|>Tom has .*\?<\|end\|><\|assistant\|>.*<\|end\|><\|user\|>That is wrong. Try again."
        r"<\|end\|><\|assistant\|>.*",
        re.DOTALL,
    )
    rows = stored_rows(folder / "runs/own/turns/rollouts/step_0")
    assert len(rows) == 64
    for row in rows:
        texts = [text for part in row["segments"] for text in part.values()]
        assert len(texts) == 4 and again.fullmatch("".join(texts)), row


@pytest.mark.slow
def test_a_workflow_from_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the tools and the agent that the page shows do what it says."""
    folder = typed((REPOSITORY / "docs" / "workflows.md").read_text(), tmp_path, "agents")
    rows = metrics(folder, "guessing")
    assert [row["step"] for row in rows] == [0, 1, 2] and 1 <= rows[0]["workflow/num_turns"] <= 3
    lines = stored_rows(folder / "runs/own/guessing/rollouts/step_0")
    assert len(lines) == 8 * 4
    for segments in (line["segments"] for line in lines):
        assert [kind for part in segments for kind in part] == ["given", "sampled"] * (len(segments) // 2)
        assert all(re.search("<.user.>(higher|lower)<", part["given"]) for part in segments[2::2])
    assert metrics(folder, "tools")[0]["workflow/num_turns"] == 1, "random weights call nothing"
    monkeypatch.syspath_prepend(folder)
    tools, walker = importlib.import_module("tools"), importlib.import_module("walker").Walker()
    environment = FunctionTools([tools.multiply, tools.weather])
    assert asyncio.run(environment.aexecute("multiply", {"a": 6, "b": 7})) == 42
    with pytest.raises(ValueError, match="there is no city Bruma"):
        asyncio.run(environment.aexecute("weather", {"city": "Bruma"}))
    assert (walker.act({"content": "Go right"}), walker.act({"content": "LEFT"})) == (1, -1)
    with pytest.raises(ParseError, match="Say left or right"):
        walker.act({"content": "up"})


@pytest.mark.slow
def test_an_agent_from_an_empty_folder(tmp_path: Path) -> None:
    folder = typed((REPOSITORY / "docs" / "agents.md").read_text(), tmp_path, "agents")
    rows = metrics(folder, "agent")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert 1 < rows[0]["agent/turns"] <= 2, "random weights answer next to nothing right"


@pytest.mark.long
@pytest.mark.slow
def test_tutorials_of_one_gpu_a_loss_and_a_run_that_does_not_learn(tmp_path: Path) -> None:
    for name in ("own-loss.md", "one-gpu.md", "not-learning.md"):
        typed((REPOSITORY / "docs" / name).read_text(), tmp_path, "arealite")
    first, last = metrics(tmp_path, "loss", "policy/blamed")[:2]
    assert 0.2 < first["policy/blamed"] < 0.8 and first["reward/std"] > 0
    assert 0.2 < last["policy/blamed"] < 0.8 and last["optim/grad_norm"] > 0
    adapter = json.loads((tmp_path / "runs/own/one/checkpoints/step_1/adapter_config.json").read_text())
    assert adapter["r"] == 4
    shown = testing_runs.run("look.py", "runs/own/stuck", cwd=tmp_path)
    assert re.search(r"reward/dead_group_ratio +first 1.0 +last 1.0\n", shown)
    assert re.search(r"optim/grad_norm +first 0.0 +last 0.0\n", shown)
    assert len(re.findall(r"^<.user.>.*-> 0.0$", shown, re.MULTILINE | re.DOTALL)) >= 1


@pytest.mark.slow
def test_a_task_of_reasoning_gym(tmp_path: Path) -> None:
    folder = typed((REPOSITORY / "docs" / "ecosystem.md").read_text(), tmp_path, "arealite")
    rows = metrics(folder, "gym")
    assert [row["step"] for row in rows] == [0, 1, 2] and "rewards/reasoning_gym_reward_fn" not in rows[0]
    assert 0 <= rows[0]["reward/mean"] < 1


@pytest.mark.slow
def test_a_graph_from_an_empty_folder(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    folder = typed((REPOSITORY / "docs" / "core.md").read_text(), tmp_path, "arealite")
    assert [row["step"] for row in metrics(folder, "graph")] == [0, 1, 2]
    calls = [json.loads(line)["call"] for line in (folder / "runs/own/graph/calls.jsonl").read_text().splitlines()]
    assert {"actor_inf", "ref_inf", "critic_inf", "advantages", "actor_train", "critic_train"} <= {*calls}


def test_every_key_of_the_table_exists() -> None:
    keys = {key for cell in re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE) for key in re.findall(r"`(\w+)`", cell)}
    assert keys <= vars(DatasetConfig()).keys() and {"prompt_key", "split"} <= keys
