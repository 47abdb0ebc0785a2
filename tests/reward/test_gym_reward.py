"""Scores of reasoning-gym are those of the library for the same completions."""

from __future__ import annotations

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from arealite.reward.gym import reasoning_gym_reward_fn

FAST = ("arc_agi", "basic_arithmetic", "chain_sum", "complex_arithmetic", "countdown", "gcd", "knights_knaves",
        "letter_counting", "prime_factorization", "spell_backward", "syllogism", "word_sorting")  # fmt: skip
SLOW = sorted(DATASETS.keys() - {*FAST, "composite"})
WRONG = ("7", "", "(1, 2", "x = 3", "nonsense")


def reward(completion: str, task: str, entry: dict[str, object]) -> float:
    return reasoning_gym_reward_fn("", completion, [], [], task=task, entry=entry, question="", answer="")


@pytest.mark.parametrize("task", [*FAST, *(pytest.param(task, marks=pytest.mark.slow) for task in SLOW)])
def test_scores_are_those_of_the_library(task: str) -> None:
    """A text at which its scorer raises scores 0."""
    data = reasoning_gym.create_dataset(task, size=2, seed=5)
    for entry in data:
        right = str(entry["answer"])
        for answer in (right, right[:-1], *WRONG):
            try:
                expected = float(data.score_answer(answer.strip(), entry))
            except Exception:
                expected = 0.0
            assert reward(f"<think>8 <answer>9</answer></think> So <answer>{answer}</answer>.", task, entry) == expected
    right = data[0]["answer"]
    assert right is None or data.score_answer(right, data[0]) > 0.5, "the test tells right from wrong"


def test_the_last_answer_counts_else_what_follows_the_thoughts() -> None:
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    right = entry["answer"]
    assert reward(f"<answer>-1</answer> no: <answer> {right} </answer>", "chain_sum", entry) == 1.0
    assert reward(f"<think>-1</think>\n{right}\n", "chain_sum", entry) == 1.0
    assert reward(f"{right} <answer>-1</answer>", "chain_sum", entry) < 1.0
