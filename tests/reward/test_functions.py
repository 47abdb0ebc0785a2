import sys

import pytest

from arealite.api.errors import ConfigError
from arealite.reward import gsm8k_reward_fn, load_rewards
from arealite.reward.runner import RewardRunner


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    source = "def {0}(completions, **others):\n    return len(completions)\nnumber = 3\n"
    (tmp_path / "own_reward.py").write_text(source.format("score"))
    (tmp_path / "wave.py").write_text(source.format("score"))
    yield tmp_path
    sys.modules.pop("own_reward", None)


async def test_a_function_of_a_file_runs_in_worker_processes(folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    (score,) = load_rewards("own_reward.py:score")
    runner = RewardRunner(score)
    assert await runner(prompt="", completions="four", prompt_ids=[], completion_ids=[]) == 4.0
    runner.close()


def test_functions_have_weights(folder) -> None:
    rewards = load_rewards({"arealite.reward:gsm8k_reward_fn": 1, f"{folder}/own_reward.py:score": 0.1})
    assert {function.__name__: weight for function, weight in rewards.items()} == {"gsm8k_reward_fn": 1, "score": 0.1}
    assert load_rewards("arealite.reward.gsm8k:gsm8k_reward_fn") == {gsm8k_reward_fn: 1.0}
    assert load_rewards({}) == {}, "a script may have a reward of its own"


def test_functions_of_one_name_are_refused_when_they_are_loaded(folder) -> None:
    """Two files, or one function twice, whose weights would replace each other."""
    (folder / "own_reward_2.py").write_text((folder / "own_reward.py").read_text())
    for other in ("own_reward_2.py", "../" + folder.name + "/own_reward.py"):
        with pytest.raises(ConfigError, match=r"names of their own: got \['score', 'score'\]"):
            load_rewards({f"{folder}/own_reward.py:score": 1, f"{folder}/{other}:score": 0.1})
    sys.modules.pop("own_reward_2", None)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("{folder}/none.py:score", "reward must be FILE.py:FUNCTION or .* that exists: got .*none.py:score"),
        ("score", "reward must be FILE.py:FUNCTION or module:FUNCTION that exists: got score"),
        ("./own_reward:score", "reward must be FILE.py:FUNCTION or .* that exists: got ./own_reward:score. Correct it"),
        ("no.such.module:score", "reward must be FILE.py:FUNCTION or module:FUNCTION that exists: got no.such.module:"),
        ("{folder}/own_reward.py:scores", "own_reward.py must have a function scores: got none. Correct reward"),
        ("{folder}/own_reward.py:number", "own_reward.py must have a function number"),
        ("{folder}/wave.py:score", "the file of a reward must have a name of its own: got .*wave.py, and .*wave"),
    ],
)
def test_what_is_no_function_is_refused(folder, name, told) -> None:
    with pytest.raises(ValueError, match=told):
        load_rewards(name.format(folder=folder))
