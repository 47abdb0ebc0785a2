"""Predicts which layout of worker groups makes a step shorter, from the calls of a measured run.

A call takes a serial part, and a parallel part times the share of the batch on its busiest rank. Not in the model:
memory, workers that slow each other down (on a CPU, more threads than cores), and layouts that divide a model: those of
the run and the config may, the proposed ones have data-parallel ranks.
"""

import copy
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
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
from arealite.api.config.loader import read_overrides, read_yaml
from arealite.api.errors import ConfigError, require
from arealite.api.run_folder import RunFolder, numbered
from arealite.core.graph import DataFlowGraph
from arealite.core.records import CallRecord, read_calls
from arealite.launcher.plan.layout import Group, make_layout
from arealite.utils.files import read_jsonl
from arealite.utils.terminal import listed

Layout = tuple[Group, ...]
SERIAL_SHARE = 0.1
"""Of a call: the part that more ranks don't shorten."""
MAX_UNITS = 16
"""Above this number of devices, ranks are multiples of `devices / MAX_UNITS`."""
_TIMERS = ("rollout", "weights", "step")
_WAIT = 0.05  # of a step, for rollouts: with less the trainer is the bottleneck
_NUM_SHOWN = 5
_WORK = ("train_dataset.batch_size", "gconfig.n_samples", "gconfig.max_new_tokens", "rollout.max_head_offpolicyness")
_CHANGE = "Give the folder of a run of this config, with workers and a declared graph."


@dataclass(frozen=True)
class Measurement:
    """Medians over the steps of a run, in seconds."""

    layout: Layout
    num_steps: int
    calls: Mapping[str, float]
    graph_s: float
    """From the begin of the first call to the end of the last one."""
    timers: Mapping[str, float]
    """`rollout`, `weights` and `step`: the whole one."""
    is_bound_by_servers: bool
    """Whether servers that never pause were waited for: a shorter step would only wait longer."""


def show(console: Console, config: BaseExperimentConfig, folder: RunFolder, num_devices: int | None) -> None:
    """Print the layouts of worker groups with the shortest predicted steps, by the calls that a run measured."""
    graph, theirs = graph_of(config), load_config(str(folder.config), [])
    _check_work(folder, theirs, config)
    measured = measure(folder, theirs, graph)
    own = make_layout(config, graph.engines)
    num_devices = num_devices or sum(group.num_ranks for group in own)

    def graph_s(layout: Layout) -> float:
        return max(end for _, end in simulate(graph, layout, measured).values())

    plans = [(graph_s(layout), layout, workers) for workers, layout in layouts(config, graph, num_devices)]
    plans.sort(key=lambda plan: (plan[0], sum(group.num_ranks for group in plan[1]), len(plan[1])))
    as_run = graph_s(measured.layout)
    error = f"predicted {as_run:.3f} s ({as_run / measured.graph_s - 1:+.1%})"
    text = f"{measured.num_steps} steps of {folder.path}, calls measured {measured.graph_s:.3f} s"
    rows = {"as run": (as_run, measured.layout)} | ({} if own == measured.layout else {"config": (graph_s(own), own)})
    rows |= {str(number): plan[:2] for number, plan in enumerate(plans[:_NUM_SHOWN], start=1)}
    parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in measured.timers.items() if name != "step")
    notes = [f"Steps of the run took {measured.timers['step']:.3f} s, of them {parts}."]
    notes.append(f"{SERIAL_SHARE:.0%} of each call is assumed to be serial.")
    if measured.is_bound_by_servers:
        notes.append("That run waited for its servers: no layout makes such steps shorter, more servers may.")
    block = {"workers": plans[0][2].model_dump(exclude_defaults=True)}
    words = yaml.safe_dump(block, default_flow_style=None, sort_keys=False)
    say = functools.partial(console.print, sep="\n", markup=False, soft_wrap=True)
    say("", f"{text}, {error}", _table(rows, measured), *notes, "", words.rstrip())


def load_config(config_file: str, overrides: Sequence[str]) -> BaseExperimentConfig:
    """Load a config, of the class of its blocks."""
    blocks = read_yaml(config_file) | read_overrides([*overrides])
    with_critic = PPOConfig if blocks.get("critic") is not None else GRPOConfig
    kind = with_critic if blocks.get("model") is None else SFTConfig
    return load_expr_config(["--config", config_file, *overrides], kind, ignore_unknown=True)[0]


def graph_of(config: BaseExperimentConfig) -> DataFlowGraph:
    """Return the graph that `training/` has for a config."""
    from arealite.core import experiments

    if isinstance(config, PPOConfig):
        return experiments.ppo(config)
    return experiments.grpo(config) if isinstance(config, GRPOConfig) else experiments.sft()


def _check_work(run: RunFolder, theirs: BaseExperimentConfig, config: BaseExperimentConfig) -> None:
    """Refuse a run with other work, whose calls, and wait for servers, do not take equally long."""
    for key in (*(f"{config.trained[0]}.{name}" for name in ("path", "dtype")), *_WORK):
        had, wanted = (functools.reduce(_value, key.split("."), one) for one in (theirs, config))
        problem = f"--measured must be of a run with the config's {key}, {wanted}: got {had} in {run.path}"
        require(had == wanted, f"{problem}. {_CHANGE}")


def _value(block: Any, name: str) -> Any:
    return getattr(block, name, None)


def measure(run: RunFolder, config: BaseExperimentConfig, graph: DataFlowGraph) -> Measurement:
    """Return the medians of a run that had this config, over complete steps after the first one and after the warm-up.

    Raises ConfigError for a run without calls, with other calls than the graph's, or without such a step.
    """
    records = [one for one in read_calls(run.calls) if "." not in one.call]  # those with a dot are the master's own
    declared, recorded = {call.name for call in graph.calls if not call.is_source}, {one.call for one in records}
    require(
        declared == recorded,
        f"--measured must hold the calls of the config's graph, {listed(sorted(declared))}: got "
        f"{listed(sorted(recorded))} in {run.path}. Give a run with the same roles, or correct the config.",
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
        f"--measured must hold a complete step, from step {begin} on and without a call that was run again: got "
        f"{len(steps)} steps in {run.path}. Let the run do more steps.",
    )
    kept = [steps[number] for number in good]
    timers = {name: median(rows[n].get(f"time/{name}_s", 0.0) for n in good) for name in _TIMERS}
    is_asynchronous = config.rollout is not None and config.rollout.max_head_offpolicyness > 0
    return Measurement(
        layout=make_layout(config, graph.engines),
        num_steps=len(good),
        calls={name: median(one.seconds for calls in kept for one in calls if one.call == name) for name in declared},
        graph_s=median(max(one.end for one in calls) - min(one.begin for one in calls) for calls in kept),
        timers=timers,
        is_bound_by_servers=is_asynchronous and timers["rollout"] > _WAIT * timers["step"],
    )


def _group_and_share(layout: Layout, role: str) -> tuple[Group, float]:
    """Return the group of a role, and the share of the batch on its busiest rank: a batch has a part per block of the
    group with the most, and the ranks of a block divide its work."""
    group = next(group for group in layout if role in group.roles)
    num_parts = max(one.sizes.data for one in layout)
    return group, -(-num_parts // group.sizes.data) / num_parts / group.sizes.block_size


def simulate(graph: DataFlowGraph, layout: Layout, measured: Measurement) -> dict[str, tuple[float, float]]:
    """Return when each call begins and ends, in seconds since the batch arrived: a group runs its calls in the graph's
    order, each after the calls it needs."""
    spans: dict[str, tuple[float, float]] = {}
    is_free_at: dict[str, float] = defaultdict(float)  # by group
    for call in graph.order():
        if call.is_source:
            continue
        group, share = _group_and_share(layout, call.role)
        _, share_then = _group_and_share(measured.layout, call.role)
        begin = max([is_free_at[group.name], *(spans[name][1] for name in graph.needs[call.name] if name in spans)])
        seconds = measured.calls[call.name] * (SERIAL_SHARE + (1 - SERIAL_SHARE) * share / share_then)
        spans[call.name] = begin, begin + seconds
        is_free_at[group.name] = begin + seconds
    return spans


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
        blocks[owner] = getattr(given, owner).new(ranks=num_ranks, parallel="", share=None)
        blocks |= {role: RoleConfig(share=owner) for role in others}
    return given.new(**blocks)


def _table(rows: Mapping[str, tuple[float, Layout]], measured: Measurement) -> Table:
    """Return the seconds of calls and steps of layouts; the first row is the measured run's own layout."""
    columns = [Column(title, justify="right") for title in ("calls", "step", "change")]
    style = {"title": "Seconds of a step", "title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD}
    table = Table("", "layout", *columns, **style)  # type: ignore[arg-type]
    step_s, (before, _) = measured.timers["step"], rows["as run"]
    for name, (graph_s, layout) in rows.items():
        text = ", ".join(f"{'+'.join(group.roles)} {group.num_ranks}" for group in layout)
        change = graph_s - before
        if measured.is_bound_by_servers:  # the wait for rollouts takes up what calls gain, and some of what they lose
            change = max(0.0, change - measured.timers["rollout"])
        table.add_row(name, text, f"{graph_s:.3f}", f"{step_s + change:.3f}", f"{change / step_s:+.1%}")
    return table
