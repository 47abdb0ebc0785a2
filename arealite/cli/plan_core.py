"""`arealite plan-core`: predicts which layout of worker groups makes a step shorter, from the calls of measured runs.

A call takes a serial part, and a parallel part times the share of the batch on its busiest rank. Not in the model:
memory, and workers that slow each other down (on a CPU, more threads than cores).
"""

import argparse
import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Column, Table

from arealite.api.cli_args import (
    BaseExperimentConfig,
    GRPOConfig,
    PPOConfig,
    RoleConfig,
    SFTConfig,
    WorkersConfig,
    load_expr_config,
)
from arealite.api.config.loader import given_value
from arealite.api.errors import ConfigError, require
from arealite.api.run_folder import RunFolder, numbered
from arealite.core.graph import DataFlowGraph
from arealite.core.records import CallRecord, read_calls
from arealite.launcher.plan.layout import Group, make_layout
from arealite.utils.files import read_jsonl
from arealite.utils.terminal import listed

Layout = tuple[Group, ...]
SERIAL_SHARE = 0.1
"""Of a call, assumed where all runs gave the call the same share of the batch."""
MAX_UNITS = 16
"""Above this number of devices, ranks are multiples of `devices / MAX_UNITS`."""
_TIMERS = ("rollout", "weights", "step")
_WAIT = 0.05  # of a step, for rollouts: with less the trainer is the bottleneck
_NUM_SHOWN = 5
_CHANGE = "Give the folder of a run of this config."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "arealite plan-core CONFIG.yaml --costs RUN_FOLDER [--costs ...] [--devices N] [key=value ...]"
    parser.description = (
        "Simulate a step of training/ scripts in every layout: which roles share workers, and how many ranks each "
        "group has. Seconds of calls are those that runs of the same work measured (calls.jsonl); runs on different "
        "numbers of ranks tell how much of a call more ranks don't shorten, which is assumed otherwise."
    )
    parser.epilog = "Memory is not judged: `arealite check` plans it."
    parser.add_argument("config", metavar="CONFIG.yaml", help="config whose workers to lay out")
    parser.add_argument("--costs", metavar="RUN_FOLDER", action="append", required=True, help="a run to learn from")
    parser.add_argument("--devices", metavar="N", type=_positive, help="of all groups (default: the config's)")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="keys to change")


def _positive(text: str) -> int:
    """Read a whole number above 0."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0: got {text}")
    return int(text)


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
    """Seconds of a call: the part that more ranks don't shorten, and the rest for the whole batch on one rank."""

    serial: float
    parallel: float


@dataclass(frozen=True)
class Interval:
    """When a call of a step runs, in seconds since the batch arrived, and the call that it waited for last."""

    begin: float
    end: float
    waited_for: str | None


@dataclass(frozen=True)
class _Plan:
    """A layout, the YAML's block for it, and its predicted step."""

    layout: Layout
    workers: WorkersConfig
    step: Mapping[str, Interval]

    @property
    def graph_s(self) -> float:
        """Seconds of the calls of a step."""
        return max(span.end for span in self.step.values())

    def __str__(self) -> str:
        return ", ".join(f"{'+'.join(group.roles)} {group.num_ranks}" for group in self.layout)


def run(args: argparse.Namespace) -> int:
    """Print the layouts with the shortest predicted steps, by the costs of measured runs, and return 0."""
    config, graph = _load(args.config, args.overrides)
    runs = [_measured(RunFolder(folder), config, graph) for folder in args.costs]
    own, costs = make_layout(config, graph.engines), fit_costs(graph, runs)

    def plan(layout: Layout, workers: WorkersConfig) -> _Plan:
        return _Plan(layout, workers, simulate(graph, layout, costs))

    choices = layouts(config, graph, args.devices or sum(group.num_ranks for group in own))
    plans = [plan(layout, workers) for workers, layout in choices]
    plans.sort(key=lambda one: (one.graph_s, sum(group.num_ranks for group in one.layout), len(one.layout)))
    as_run = [plan(measured.layout, WorkersConfig()) for measured in runs]
    console = Console(highlight=False)
    for measured, predicted in zip(runs, as_run):
        error = f"predicted {predicted.graph_s:.3f} s ({predicted.graph_s / measured.graph_s - 1:+.1%})"
        text = f"{measured.path}: {predicted}; {measured.num_steps} steps, calls measured {measured.graph_s:.3f} s"
        console.print(f"{text}, {error}", soft_wrap=True)
    rows = {"as run": as_run[0]} | ({} if own == runs[0].layout else {"config": plan(own, WorkersConfig())})
    rows |= {str(number): one for number, one in enumerate(plans[:_NUM_SHOWN], start=1)}
    console.print(_table(rows, runs[0]))
    console.print("\n".join(_remarks(plans[0], costs, runs, graph)), soft_wrap=True)
    block = {"workers": plans[0].workers.model_dump(exclude_defaults=True)}
    text = yaml.safe_dump(block, default_flow_style=None, sort_keys=False)
    console.print(f"\n{text}", end="", markup=False, soft_wrap=True)
    return 0


def _load(config_file: str, overrides: Sequence[str]) -> tuple[BaseExperimentConfig, DataFlowGraph]:
    """Return a config, of the class of its blocks, and the graph that `training/` has for it."""
    from arealite.core import experiments

    argv = ["--config", config_file, *overrides]
    if given_value("model", config_file, overrides) is not None:
        return load_expr_config(argv, SFTConfig)[0], experiments.sft()
    if given_value("critic", config_file, overrides) is not None:
        ppo = load_expr_config(argv, PPOConfig)[0]
        return ppo, experiments.ppo(ppo)
    grpo = load_expr_config(argv, GRPOConfig)[0]
    return grpo, experiments.grpo(grpo)


def _measured(run: RunFolder, config: BaseExperimentConfig, graph: DataFlowGraph) -> Measurement:
    """Measure a run that did the work of a config; ranks of its groups are those of its own config."""
    require(run.config.exists(), f"costs must be a run folder with config.yaml: got none in {run.path}. {_CHANGE}")
    theirs, _ = _load(str(run.config), [])
    had = _work(theirs)
    for key, value in _work(config).items():
        problem = f"costs must be of a run with the config's {key}, {value}: got {had.get(key)} in {run.path}."
        require(had.get(key) == value, f"{problem} {_CHANGE}")
    return measure(run, theirs, graph)


def _work(config: BaseExperimentConfig) -> dict[str, Any]:
    """Return by key what must be equal for calls, and the wait for servers, to take equally long."""
    key, block = config.trained
    work = {
        f"{key}.path": block.path,
        f"{key}.dtype": block.dtype,
        "train_dataset.batch_size": config.train_dataset.batch_size,
    }
    if config.sampling is not None and config.rollout is not None:
        work |= {f"gconfig.{name}": getattr(config.sampling, name) for name in ("n_samples", "max_new_tokens")}
        work["rollout.max_head_offpolicyness"] = config.rollout.max_head_offpolicyness
    return work


def measure(run: RunFolder, config: BaseExperimentConfig, graph: DataFlowGraph) -> Measurement:
    """Return the medians of a run that had this config, over complete steps after the first one and after the warm-up.

    Raises ConfigError for a run without calls, with other calls than the graph's, or without such a step.
    """
    change = "Name the folder of a run with workers and a declared graph."
    require(run.calls.exists(), f"costs must be a run folder with calls.jsonl: got none in {run.path}. {change}")
    records = [one for one in read_calls(run.calls) if "." not in one.call]  # those with a dot are the master's own
    declared, recorded = {call.name for call in graph.calls if not call.is_source}, {one.call for one in records}
    require(
        declared == recorded,
        f"costs must hold the calls of the config's graph, {listed(sorted(declared))}: got {listed(sorted(recorded))} "
        f"in {run.path}. Give the costs of a run with the same roles, or correct the config.",
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
    """Return the share of a batch on the busiest rank of a group; a batch has a part per rank of the largest group."""
    num_parts = max(one.num_ranks for one in layout)
    return -(-num_parts // group.num_ranks) / num_parts


def group_of(layout: Layout, role: str) -> Group:
    """Return the group that has a role."""
    return next(group for group in layout if role in group.roles)


def _shares(run: Measurement, graph: DataFlowGraph) -> dict[str, float]:
    """Return by call the share of the batch on its busiest rank."""
    calls = (call for call in graph.calls if not call.is_source)
    return {call.name: busiest_share(run.layout, group_of(run.layout, call.role)) for call in calls}


def fit_costs(graph: DataFlowGraph, runs: Sequence[Measurement]) -> dict[str, Cost]:
    """Return the least squares of seconds over shares by call, neither part below 0."""
    shares = [_shares(run, graph) for run in runs]
    return {name: _fit([one[name] for one in shares], [run.calls[name] for run in runs]) for name in shares[0]}


def _fit(shares: Sequence[float], seconds: Sequence[float]) -> Cost:
    if len(set(shares)) == 1:
        return Cost(SERIAL_SHARE * fmean(seconds), (1 - SERIAL_SHARE) * fmean(seconds) / shares[0])
    slope, intercept = linear_regression(shares, seconds)
    if slope <= 0:
        return Cost(fmean(seconds), 0.0)
    if intercept < 0:
        return Cost(0.0, linear_regression(shares, seconds, proportional=True).slope)
    return Cost(intercept, slope)


def simulate(graph: DataFlowGraph, layout: Layout, costs: Mapping[str, Cost]) -> dict[str, Interval]:
    """Return when each call runs: a group runs its calls in the graph's order, each after the calls it needs."""
    spans: dict[str, Interval] = {}
    last: dict[str, str] = {}  # call of each group
    for call in graph.order():
        if call.is_source:
            continue
        group, cost = group_of(layout, call.role), costs[call.name]
        before = [name for name in (*graph.needs[call.name], last.get(group.name)) if name in spans]
        waited_for = max(before, key=lambda name: spans[name].end, default=None)
        begin = spans[waited_for].end if waited_for is not None else 0.0
        end = begin + cost.serial + cost.parallel * busiest_share(layout, group)
        spans[call.name], last[group.name] = Interval(begin, end, waited_for), call.name
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
    """Yield each way to give roles groups and groups ranks on so many devices: the config block and its groups."""
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


def _workers(given: WorkersConfig, partition: Sequence[Sequence[str]], ranks: Sequence[int]) -> WorkersConfig:
    """Return the config block: the first role of a group has its ranks, threads and strategy."""
    blocks: dict[str, Any] = {}
    for (owner, *others), num_ranks in zip(partition, ranks):
        blocks[owner] = getattr(given, owner).new(ranks=num_ranks, share=None)
        blocks |= {role: RoleConfig(share=owner) for role in others}
    return given.new(**blocks)


def _table(rows: Mapping[str, _Plan], run: Measurement) -> Table:
    """Return the seconds of calls and steps of layouts; the first row is the run's own layout."""
    columns = [Column(title, justify="right") for title in ("calls", "step", "change")]
    style = {"title": "Seconds of a step", "title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD}
    table = Table("", "layout", *columns, **style)  # type: ignore[arg-type]
    before = next(iter(rows.values())).graph_s
    for name, plan in rows.items():
        step_s = run.step_s(plan.graph_s - before)
        table.add_row(name, str(plan), f"{plan.graph_s:.3f}", f"{step_s:.3f}", f"{step_s / run.step_s(0.0) - 1:+.1%}")
    return table


def _remarks(
    best: _Plan, costs: Mapping[str, Cost], runs: Sequence[Measurement], graph: DataFlowGraph
) -> Iterator[str]:
    """Yield what a reader of the table must know."""
    run = runs[0]
    path = [f"{name} {best.step[name].end - best.step[name].begin:.3f} s" for name in critical_path(best.step)]
    yield f"Critical path of 1: {', '.join(path)}."
    parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in run.timers.items() if name != "step")
    yield f"Steps of {run.path} took {run.timers['step']:.3f} s, of them {parts}."
    if run.is_bound_by_servers:
        yield "That run waited for its servers: no layout makes such steps shorter, more servers may."
    if rigid := [name for name, cost in costs.items() if cost.parallel == 0]:
        yield f"More ranks made {listed(rigid)} no faster."
    shares = [_shares(one, graph) for one in runs]
    if assumed := [name for name in costs if len({one[name] for one in shares}) == 1]:
        part = f"{SERIAL_SHARE:.0%} of {listed(assumed)} is assumed to be serial"
        yield f"{part}: the costs have one number of ranks. Add others."
