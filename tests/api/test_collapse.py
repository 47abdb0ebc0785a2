"""What is said of a run that goes wrong, and of one that does not."""

from typing import Any

import pytest

from arealite.api.collapse import NUM_STEPS, first_warning

HEALTHY: dict[str, float] = {
    "reward/mean": 0.4,
    "reward/std": 0.5,
    "reward/dead_group_ratio": 0.3,
    "policy/mismatch_kl": 1e-3,
    "policy/entropy": 0.8,
    "optim/grad_norm": 0.5,
    "rollout/truncated_ratio": 0.1,
}
FLAT = {"reward/mean": 0.0, "reward/std": 0.0, "reward/dead_group_ratio": 1.0, "optim/grad_norm": 0.0}


def run(*changes: dict[str, Any], num_healthy: int = NUM_STEPS) -> list[dict[str, Any]]:
    rows = [HEALTHY] * num_healthy + [HEALTHY | change for change in changes]
    return [{"step": step, **row} for step, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("change", "num_steps", "told"),
    [
        ({"policy/mismatch_kl": 2600.0}, 2, "mismatch_kl 2.6e+03). Lower actor.optimizer.lr"),
        ({"policy/mismatch_kl": None}, 2, "mismatch_kl nan). Lower actor.optimizer.lr"),
        ({"policy/mismatch_kl": float("inf")}, 2, "mismatch_kl inf). Lower actor.optimizer.lr"),
        ({"optim/grad_norm": 51.0}, 3, "grad_norm 51). Lower actor.optimizer.lr"),
        ({"policy/entropy": 0.01}, 3, "(entropy 0.01) and rewards no better. Lower actor.optimizer.lr"),
        ({"rollout/truncated_ratio": 0.97}, 5, "(97% cut off). Raise gconfig.max_new_tokens"),
        (FLAT, NUM_STEPS, "all rewards of the last 10 steps are 0, so nothing is learned"),
    ],
)
def test_each_sign_is_told_with_its_number_and_a_key(change: dict[str, Any], num_steps: int, told: str) -> None:
    assert first_warning(run(*[change] * (num_steps - 1))) is None
    step, warning = first_warning(run(*[change] * (num_steps + 3))) or (0, "")
    assert step == NUM_STEPS + num_steps - 1 and told in warning and warning.endswith("(docs/not-learning.md)")
    interrupted = [change] * (num_steps - 1) + [{}]
    assert first_warning(run(*interrupted * 2)) is None


def test_a_run_that_learns_is_left_alone() -> None:
    """It solves its task: little entropy, equal rewards in most groups, and a large gradient at the start."""
    rows = run(
        *[{"reward/mean": 0.9 + 0.01 * n, "policy/entropy": 1e-3, "reward/dead_group_ratio": 0.9} for n in range(9)]
    )
    rows[0] |= {"optim/grad_norm": 900.0, "rollout/truncated_ratio": 0.6}
    assert first_warning([*rows, {"step": 19, "eval/accuracy": 0.98}]) is None


def test_completions_that_never_ended_are_no_change() -> None:
    assert first_warning(run(*[{"rollout/truncated_ratio": 1.0}] * 9, num_healthy=0)) is None
