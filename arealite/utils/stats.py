"""Metrics of one step: added on any rank and reduced over values and ranks at its end; the same on every rank.

A mean counts every added value once. Timers are those of rank 0: a mean over ranks, which wait for each other, would
hide the cause of a wait.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch.distributed as dist

from arealite.utils import heartbeat, trace
from arealite.utils.distributed import of_all_ranks

Reduction = Literal["mean", "sum", "min", "max"]


def reduction_of(key: str) -> Reduction:
    """Return the default reduction of a metric: max or min by the end of its name, else mean."""
    last = key.rsplit("/", 1)[-1].rsplit("_", 1)[-1]
    return "max" if last == "max" else "min" if last == "min" else "mean"


@dataclass(frozen=True)
class _Reduced:
    kind: Reduction
    value: float
    count: int = 1

    def merge(self, other: "_Reduced", *, key: str) -> "_Reduced":
        if other.kind != self.kind:
            raise ValueError(f"metric {key} must keep one reduction: got {self.kind} and {other.kind}. Rename one.")
        combine = {"min": np.minimum, "max": np.maximum}.get(self.kind, np.add)  # NaN and any other value make NaN
        return _Reduced(self.kind, float(combine(self.value, other.value)), self.count + other.count)

    def result(self) -> float:
        return self.value / self.count if self.kind == "mean" else self.value


class StatsTracker:
    """Collects the metrics and timers of one step after another."""

    def __init__(self) -> None:
        self._metrics: dict[str, _Reduced] = {}
        self._times_s: dict[str, float] = {}
        self._step_began: float | None = None

    def add(self, metrics: Mapping[str, float], *, reduce: Reduction | None = None) -> None:
        self._step_began = self._step_began or time.perf_counter()
        for key, value in metrics.items():
            new = _Reduced(reduce or reduction_of(key), float(value))
            self._metrics[key] = self._metrics[key].merge(new, key=key) if key in self._metrics else new

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `time/<name>_s` of this step, also if it fails."""
        began = time.perf_counter()
        self._step_began = self._step_began or began
        try:
            yield
        finally:
            key, ended = f"time/{name}_s", time.perf_counter()
            trace.record(name, began, ended)  # both clocks are one on Linux
            self._times_s[key] = self._times_s.get(key, 0.0) + ended - began

    def collect(self, step: int = 0) -> dict[str, float]:
        """Return the metrics of step `step` reduced over ranks, and its times; start the next one (collective).

        `time/step_s` is the time since the end of the last step, or since the first use.
        """
        now = time.perf_counter()
        trace.record(f"step {step}", self._step_began or now, now)
        times_s = {**self._times_s, "time/step_s": now - (self._step_began or now)}
        ranks = [(self._metrics, times_s)]
        if dist.is_initialized():
            with heartbeat.waiting("the metrics of all ranks", on="ranks"):
                ranks = of_all_ranks(ranks[0])
        merged: dict[str, _Reduced] = {}
        for metrics, _ in ranks:
            for key, metric in metrics.items():
                merged[key] = merged[key].merge(metric, key=key) if key in merged else metric
        self._metrics, self._times_s, self._step_began = {}, {}, now
        return {key: metric.result() for key, metric in merged.items()} | ranks[0][1]
