"""Whether a run trains on all kinds of prompts that it issued, or on the quick and short ones among them.

Prompts that ended are sorted by a measure and cut into ten parts of (nearly) equal size. The trained share of the
slowest (longest) part is compared with that of the fastest (shortest) by the difference of two proportions:

    p_high - p_low,    standard error = sqrt(p (1 - p) (1 / n_high + 1 / n_low))

with the pooled share `p`. A difference within two errors is what chance gives if dropping ignores the measure.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Measure = Literal["latency_s", "tokens"]


@dataclass(frozen=True)
class EndedPrompt:
    """A prompt that was trained, rejected or failed."""

    outcome: str  # `trained`, `rejected_<reason>` or `failed_<kind>`
    latency_s: float | None
    tokens: float | None  # mean over the group


@dataclass(frozen=True)
class Part:
    """A tenth of the prompts that ended."""

    low: float  # smallest value of the measure
    high: float  # largest value of the measure
    settled: int
    trained_share: float
    dropped_shares: dict[str, float]  # by outcome


@dataclass(frozen=True)
class Bias:
    """How outcomes depend on one measure."""

    measure: Measure
    unmeasured: int  # prompts without a value, which are in no part
    parts: list[Part]  # ascending; fewer than ten if there are fewer prompts
    difference: float | None
    """Trained share of the highest part minus that of the lowest; None with fewer than two parts."""
    standard_error: float | None


def bias_of(ended: Sequence[EndedPrompt], *, by: Measure, num_parts: int = 10) -> Bias:
    """Compare the outcomes of prompts of different latency or length."""
    measured = [(value, one) for one in ended if (value := getattr(one, by)) is not None]
    measured.sort(key=lambda pair: pair[0])
    num_parts = min(num_parts, len(measured))
    cuts = [len(measured) * part // num_parts for part in range(num_parts + 1)] if measured else []
    parts = [_part(measured[start:end]) for start, end in itertools.pairwise(cuts)]
    difference = error = None
    if len(parts) > 1:
        difference = parts[-1].trained_share - parts[0].trained_share
        error = _pooled_error(parts[0], parts[-1])
    return Bias(by, len(ended) - len(measured), parts, difference, error)


def _part(measured: Sequence[tuple[float, EndedPrompt]]) -> Part:
    count = len(measured)
    outcomes = Counter(one.outcome for _, one in measured)
    trained = outcomes.pop("trained", 0)
    dropped = {outcome: number / count for outcome, number in outcomes.most_common()}
    return Part(measured[0][0], measured[-1][0], count, trained / count, dropped)


def _pooled_error(one: Part, other: Part) -> float:
    count = one.settled + other.settled
    share = (one.trained_share * one.settled + other.trained_share * other.settled) / count
    return math.sqrt(share * (1 - share) * (1 / one.settled + 1 / other.settled))
