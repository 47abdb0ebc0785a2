"""What a step would take in other layouts: costs from the calls of runs, a simulation of the graph, and a search.

A call takes a serial part, and a parallel part times the share of the batch that its busiest rank has. Not in the
model: memory, and workers that slow each other down (on a CPU, more threads than cores).
"""

import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any

from arealite.api.cli_args import BaseExperimentConfig, RoleConfig, WorkersConfig
from arealite.api.errors import ConfigError, require
from arealite.api.run_folder import RunFolder, numbered
from arealite.core.graph import DataFlowGraph
from arealite.core.records import CallRecord, read_calls
from arealite.launcher.plan.layout import Group, make_layout
from arealite.utils.files import read_jsonl
from arealite.utils.terminal import listed

Layout = tuple[Group, ...]
MAX_UNITS = 16
"""Above so many devices, ranks are multiples of `devices / MAX_UNITS`."""
_TIMERS = ("rollout", "weights", "step")
_WAIT = 0.05  # of a step, for rollouts; with less the trainer is what is slow


@dataclass(frozen=True)
class Measurement:
    """Medians over the steps of a run, in seconds."""

    path: Path
    layout: Layout
    num_steps: int
    is_asynchronous: bool
    calls: Mapping[str, float]
    graph_s: float
    """From the begin of the first call to the end of the last one."""
    timers: Mapping[str, float]
    """`rollout`, `weights` and `step`: the whole one."""

    @property
    def is_bound_by_servers(self) -> bool:
        """Whether servers that never pause were waited for: a shorter step would only wait longer."""
        return self.is_asynchronous and self.timers["rollout"] > _WAIT * self.timers["step"]

    def step_s(self, change: float) -> float:
        """Return the seconds of a step whose calls take `change` longer, all else as measured."""
        if self.is_bound_by_servers:
            change = max(0.0, change - self.timers["rollout"])
        return self.timers["step"] + change


@dataclass(frozen=True)
class Cost:
    """Seconds of a call: some that more ranks don't shorten, and those of the whole batch on one rank."""

    serial: float
    parallel: float

    def seconds(self, share: float) -> float:
        """Return what the call takes if its busiest rank has this share of the batch."""
        return self.serial + self.parallel * share


@dataclass(frozen=True)
class Interval:
    """When a call of a step runs, in seconds since the batch was there, and the call that it waited for last."""

    begin: float
    end: float
    waited_for: str | None


def measure(run: RunFolder, config: BaseExperimentConfig, graph: DataFlowGraph) -> Measurement:
    """Return the medians of a run that had this config, over complete steps after the first one and after the warm-up.

    Raises ConfigError for a run without calls, with other calls than the graph's, or without such a step.
    """
    change = "Name the folder of a run with workers and a declared graph."
    require(run.calls.exists(), f"costs must be a run folder with calls.jsonl: got none in {run.path}. {change}")
    records = [one for one in read_calls(run.calls) if "." not in one.call]  # those with a dot are the master's own
    declared, found = {call.name for call in graph.calls if not call.is_source}, {one.call for one in records}
    require(
        declared == found,
        f"costs must hold the calls of the config's graph, {listed(sorted(declared))}: got {listed(sorted(found))} in "
        f"{run.path}. Give the costs of a run with the same roles, or correct the config.",
    )
    steps: dict[int, list[CallRecord]] = defaultdict(list)
    for one in records:
        steps[one.step].append(one)
    first, warm = min(steps) + 1, getattr(config, "critic_warmup_steps", 0)
    begin = max(first, warm, *numbered(run.path, "config_until_", ".yaml"))  # the last config's
    rows = {row["step"]: row for row in read_jsonl(run.metrics) if "time/step_s" in row}
    once = Counter(declared)
    good = [n for n, calls in steps.items() if n >= begin and n in rows and Counter(one.call for one in calls) == once]
    require(
        bool(good),
        f"costs must hold a complete step, from step {begin} on and without a call that was run again: got "
        f"{len(steps)} steps in {run.path}. Let the run do more steps.",
    )
    kept = [steps[number] for number in good]
    return Measurement(
        path=run.path,
        is_asynchronous=config.rollout is not None and config.rollout.max_head_offpolicyness > 0,
        layout=make_layout(config, graph.engines),
        num_steps=len(good),
        calls={name: median(one.seconds for calls in kept for one in calls if one.call == name) for name in declared},
        graph_s=median(max(one.end for one in calls) - min(one.begin for one in calls) for calls in kept),
        timers={name: median(rows[n].get(f"time/{name}_s", 0.0) for n in good) for name in _TIMERS},
    )


def busiest_share(layout: Layout, group: Group) -> float:
    """Return the share of a batch that the busiest rank of a group has: whole parts, as many as the largest group."""
    num_parts = max(one.num_ranks for one in layout)
    return -(-num_parts // group.num_ranks) / num_parts


def costs(graph: DataFlowGraph, runs: Sequence[Measurement], *, serial_share: float) -> dict[str, Cost]:
    """Fit the costs of the calls; where all runs gave a call the same share, `serial_share` of its time is serial."""
    return {name: _fit(points, serial_share) for name, points in _points(graph, runs).items()}


def not_fitted(graph: DataFlowGraph, runs: Sequence[Measurement]) -> list[str]:
    """Return the calls whose serial part the runs don't tell."""
    return [name for name, points in _points(graph, runs).items() if len({share for share, _ in points}) == 1]


def _points(graph: DataFlowGraph, runs: Sequence[Measurement]) -> dict[str, list[tuple[float, float]]]:
    """Return by call, for each run, the share of its busiest rank and its seconds."""
    return {
        call.name: [(busiest_share(run.layout, group_of(run.layout, call.role)), run.calls[call.name]) for run in runs]
        for call in graph.calls
        if not call.is_source
    }


def group_of(layout: Layout, role: str) -> Group:
    """Return the group that has a role."""
    return next(group for group in layout if role in group.roles)


def _fit(points: Sequence[tuple[float, float]], serial_share: float) -> Cost:
    """Return the least squares of seconds over shares, neither part below 0."""
    shares, seconds = zip(*points)
    if len(set(shares)) == 1:
        return Cost(serial_share * fmean(seconds), (1 - serial_share) * fmean(seconds) / shares[0])
    slope, intercept = linear_regression(shares, seconds)
    if slope <= 0:
        return Cost(fmean(seconds), 0.0)
    if intercept < 0:
        return Cost(0.0, linear_regression(shares, seconds, proportional=True).slope)
    return Cost(intercept, slope)


def simulate(graph: DataFlowGraph, layout: Layout, price: Mapping[str, Cost]) -> dict[str, Interval]:
    """Return when each call runs: a group does its calls in the graph's order, each once what it needs has ended."""
    spans: dict[str, Interval] = {}
    last: dict[str, str] = {}  # call of each group
    for call in graph.order():
        if call.is_source:
            continue
        group = group_of(layout, call.role)
        before = [name for name in (*graph.needs[call.name], last.get(group.name)) if name in spans]
        waited_for = max(before, key=lambda name: spans[name].end, default=None)
        begin = spans[waited_for].end if waited_for is not None else 0.0
        seconds = price[call.name].seconds(busiest_share(layout, group))
        spans[call.name], last[group.name] = Interval(begin, begin + seconds, waited_for), call.name
    return spans


def critical_path(spans: Mapping[str, Interval]) -> list[str]:
    """Return the calls, each waiting for the one before, that end last."""
    path = [max(spans, key=lambda name: spans[name].end)]
    while (before := spans[path[0]].waited_for) is not None:
        path.insert(0, before)
    return path


def layouts(
    config: BaseExperimentConfig, graph: DataFlowGraph, num_devices: int
) -> Iterator[tuple[WorkersConfig, Layout]]:
    """Yield each way to give roles groups and groups ranks on so many devices: the block, and the groups it means."""
    unit = -(-num_devices // MAX_UNITS)
    changed, (trained, _) = copy.copy(config), config.trained
    for partition in _partitions(sorted(graph.engines, key=lambda role: role != trained)):
        for units in itertools.product(range(1, num_devices // unit + 1), repeat=len(partition)):
            if sum(units) * unit > num_devices:
                continue
            changed.workers = _workers(config.workers or WorkersConfig(), partition, [unit * one for one in units])
            try:
                yield changed.workers, make_layout(changed, graph.engines)
            except ConfigError:  # its strategy finds no nodes, or it is more than the cluster has
                continue


def _partitions(roles: Sequence[str]) -> Iterator[list[list[str]]]:
    """Yield the ways to put roles into groups."""
    if not roles:
        yield []
        return
    *others, role = roles
    for partition in _partitions(others):
        yield [*partition, [role]]
        for index in range(len(partition)):
            yield [[*group, role] if index == number else group for number, group in enumerate(partition)]


def _workers(wishes: WorkersConfig, partition: Sequence[Sequence[str]], ranks: Sequence[int]) -> WorkersConfig:
    """Return the block: the first role of a group has its ranks, threads and strategy."""
    blocks: dict[str, Any] = {}
    for (owner, *others), num_ranks in zip(partition, ranks):
        blocks[owner] = getattr(wishes, owner).new(ranks=num_ranks, share=None)
        blocks |= {role: RoleConfig(share=owner) for role in others}
    return wishes.new(**blocks)
