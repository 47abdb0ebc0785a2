"""Tells from the metrics of a run that it goes wrong, with the likely cause and the key that changes it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Row = Mapping[str, Any]
NUM_STEPS = 10  # looked back at
MISMATCH_KL = 1.0  # nats per token; healthy runs stay below 0.05
GRAD_NORM_RISE = 100.0  # over the median of the first steps
ENTROPY_LEFT = 0.02  # of that of the first step, without a better reward
TRUNCATED, TRUNCATED_AT_FIRST = 0.95, 0.5


@dataclass(frozen=True)
class _Sign:
    """What all of the last `num_steps` rows have in common if it holds."""

    num_steps: int
    holds: Callable[[Row, Sequence[Row]], bool]
    """Of a row, and the first rows of the run."""
    key: str
    text: str
    """Formatted with the metric `key` of the last row."""


def _above(row: Row, key: str, bound: float) -> bool:
    """Tell whether a metric is above a bound, or not finite (null in files)."""
    value: float | None = row.get(key, 0.0)
    return value is None or not value <= bound


def _norm_rises(row: Row, first: Sequence[Row]) -> bool:
    before = [norm for one in first if (norm := one.get("optim/grad_norm"))]
    return len(before) == NUM_STEPS and _above(row, "optim/grad_norm", GRAD_NORM_RISE * max(0.1, median(before)))


def _entropy_is_gone(row: Row, first: Sequence[Row]) -> bool:
    before, now = (one.get("policy/entropy") for one in (first[0], row))
    is_better = row.get("reward/mean", 0.0) > first[0].get("reward/mean", 0.0)
    return before is not None and now is not None and now < ENTROPY_LEFT * before and not is_better


def _is_cut_off(row: Row, first: Sequence[Row]) -> bool:
    ratio = "rollout/truncated_ratio"
    return row.get(ratio, 0.0) >= TRUNCATED and first[0].get(ratio, 1.0) <= TRUNCATED_AT_FIRST


SIGNS = (
    _Sign(
        2,
        lambda row, _: _above(row, "policy/mismatch_kl", MISMATCH_KL),
        "policy/mismatch_kl",
        "the policy has left what samples it (mismatch_kl {:.3g}). Lower actor.optimizer.lr",
    ),
    _Sign(3, _norm_rises, "optim/grad_norm", "gradients have grown (grad_norm {:.3g}). Lower actor.optimizer.lr"),
    _Sign(
        3,
        _entropy_is_gone,
        "policy/entropy",
        "all completions become alike (entropy {:.2g}) and rewards no better. Lower actor.optimizer.lr, or raise "
        "actor.eps_clip_higher",
    ),
    _Sign(
        5,
        _is_cut_off,
        "rollout/truncated_ratio",
        "completions no longer end ({:.0%} cut off). Raise gconfig.max_new_tokens, or lower actor.optimizer.lr",
    ),
    _Sign(
        NUM_STEPS,
        lambda row, _: row.get("reward/dead_group_ratio") == 1.0 and row.get("reward/std", 0.0) == 0.0,
        "reward/mean",
        f"all rewards of the last {NUM_STEPS} steps are {{:.3g}}, so nothing is learned. Look at completions, then at "
        "the reward and the difficulty of the data",
    ),
)


def warning_of(first: Sequence[Row], last: Sequence[Row]) -> str | None:
    """Return a warning about the last steps of a run, given its first `NUM_STEPS`; None if nothing is wrong."""
    for sign in SIGNS:
        rows = last[-sign.num_steps :]
        if len(rows) == sign.num_steps and all(sign.holds(row, first) for row in rows):
            value = rows[-1].get(sign.key)
            return f"{sign.text.format(math.nan if value is None else value)} (docs/not-learning.md)"
    return None


def first_warning(rows: Sequence[Row]) -> tuple[int, str] | None:
    """Return the step of a run's first warning, and the warning."""
    steps = [row for row in rows if "reward/mean" in row]
    for end in range(1, len(steps) + 1):
        if warning := warning_of(steps[: min(end, NUM_STEPS)], steps[max(0, end - NUM_STEPS) : end]):
            return int(steps[end - 1]["step"]), warning
    return None
