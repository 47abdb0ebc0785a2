"""`arealite plan`: whether a run fits, how fast it would be, and what to change, before it starts."""

import argparse
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table

from arealite.api.cli_args import BaseExperimentConfig, GRPOConfig
from arealite.api.errors import ConfigError, require
from arealite.api.run_folder import RunFolder
from arealite.cli import plan_groups
from arealite.cli.plan_groups import load_config
from arealite.cli.simulate import HELPS, add_costs, gpu_name, row_of, work_of, write_page
from arealite.utils.files import read_jsonl, reading

if TYPE_CHECKING:  # they import torch
    from arealite.planner.needs import Needs
    from arealite.planner.search import Candidate

_NUM_SHOWN = 3
_GAIN = 0.95  # of a step: a change that is worth a line
_MOST_TOKENS = 2**22
_OFFLOADS = "fsdp.offload_params"  # whose seconds are not predicted: comes last
Changes = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "arealite plan CONFIG.yaml [--gpu NAME|FILE] [key=value ...]"
    parser.description = "Say whether a run fits, how fast it would be and what decides it, and which keys to change."
    parser.epilog = "docs/planning.md walks through two runs, and says what is assumed and how far off it is."
    add = add_costs(parser)
    add("config", metavar="CONFIG.yaml", help="config of the run")
    add("--nodes", metavar="N", type=int, help="of the cluster (default: the config's)")
    add("--measured", metavar="RUN", help="show what this run measured beside the plan; with workers, lay them out")
    add("--simulate", metavar="N", type=int, default=0, help="simulate the best N splits (minutes for 100 GPUs)")
    add("--page", metavar="FILE", type=Path, help="write an HTML page on the simulated ones")
    add("overrides", metavar="key=value", nargs="*", help="keys to change")


def run(args: argparse.Namespace) -> int:
    """Print the plan, and return 1 if the run does not fit."""
    return 0 if Plan(args).show(Console(highlight=False)) else 1


class Plan:
    """What is known of a run before it starts."""

    def __init__(self, args: argparse.Namespace) -> None:
        from arealite.cli.check.memory import divider, load_model, shapes_beside
        from arealite.planner.cost import load_gpu
        from arealite.planner.memory import model_shape
        from arealite.planner.needs import positions_of
        from arealite.planner.search import Device

        self._args, self._words = args, [*args.overrides, *([f"cluster.n_nodes={args.nodes}"] if args.nodes else [])]
        self._config = self._load({})
        mode = self._config.allocation
        has_ranks = self._config.workers is not None or (mode is not None and mode.train.data > 0)
        require(has_ranks, f"allocation_mode must name trainers: got {mode}. Add e.g. +d4.")
        self._has_gpus = self._config.cluster.n_gpus_per_node > 0
        self._gpu = gpu_name(args.gpu, self._config)
        require(not args.page or args.simulate > 0, "--page must have something to draw: got no --simulate. Add it.")
        (work, self._lengths), gpu = work_of(args.lengths, seed=1), load_gpu(self._gpu)
        try:
            model = load_model(self._config)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        shape, others, self._memory = model_shape(model), shapes_beside(self._config, model), gpu["memory"]
        self._device, self._can_divide = Device(shape, others, positions_of(model), gpu, work), divider(model)
        self._longest = _largest(lambda tokens: self._device.needs(self._config, tokens).ranks_fit(self._memory))
        self._micro_batch = _largest(self._fits_micro_batch)

    def _load(self, changes: Changes) -> BaseExperimentConfig:
        return load_config(self._args.config, [*self._words, *(f"{key}={value}" for key, value in changes.items())])

    def _fits_micro_batch(self, tokens: int) -> bool:
        config, (key, block) = copy.copy(self._config), self._config.trained
        setattr(config, key, block.new(mb_spec=block.mb_spec.new(max_tokens_per_mb=tokens, n_mbs=1)))
        return self._device.needs(config).ranks_fit(self._memory)

    def show(self, console: Console) -> bool:
        """Print the plan, and return whether the run fits."""
        from arealite.cli.check.memory import memory_table

        config, needs = self._config, self._device.needs(self._config)
        say = functools.partial(console.print, soft_wrap=True, markup=False, sep="\n")
        millions = self._device.shape.num_parameters / 1e6
        size = f"{millions:{',.0f' if millions > 10 else '.3g'}} million parameters"
        say(f"{config.trained[1].path}, {size}: {needs.mode} on {self._gpu}", "", memory_table(needs))
        for verdict in needs.verdicts(self._memory, math.inf if self._has_gpus else self._memory):
            say(f"{verdict.level}: {verdict.text}. {verdict.fix}".rstrip())
        say(" ".join(self._room(needs)), "")
        fits = needs.fit(self._memory)
        if config.workers is None:
            now, found = self._judge({}), list["Candidate"]()
            if now is not None:
                say(*_seconds(now), "")
            if isinstance(config, GRPOConfig) and needs.mode.beside == "+":
                from arealite.planner.search import splits

                every = splits(self._device, config, self._can_divide)
                found = [one for one in every if str(one.needs.mode) != str(needs.mode)][:_NUM_SHOWN]
                say(self._table([*([now] if now else []), *found]))
            say(*self._advice(now if fits else None, found), "")
        if self._args.measured is not None:
            self._compare(console, RunFolder(self._args.measured))
        say(f"Assumed: {self._lengths}; {self._gpu}'s profile (docs/planning.md).")
        return fits

    def _judge(self, changes: Changes) -> "Candidate | None":
        """Return what a changed config needs and takes; None if it is refused."""
        try:
            return self._device.judge(self._load(changes))
        except ConfigError:
            return None

    def _room(self, needs: "Needs") -> Iterator[str]:
        """Yield the longest sequence, the largest micro-batch, and the sequences that fit."""
        from arealite.planner.cost import tokens_of

        key, is_whole = f"{self._config.trained[0]}.mb_spec.max_tokens_per_mb", self._micro_batch >= _MOST_TOKENS
        if self._longest:
            yield f"A rank has room for a sequence of {self._longest:,} tokens ({needs.longest:,} are asked for)"
            yield "and for all its tokens in one micro-batch." if is_whole else f"and for {key}={self._micro_batch}."
        if needs.server and self._has_gpus:
            most = self._config.sampling.max_new_tokens if self._config.sampling else math.inf
            mean, tokens = tokens_of(self._device.work, most).mean(), needs.cache_tokens(self._memory)
            yield f"A server's cache holds {tokens:,} tokens, {tokens / mean:,.0f} sequences of {mean:,.0f}."

    def _table(self, candidates: "Sequence[Candidate]") -> Table:
        """Return the seconds of splits; those of the first ones are simulated, too."""
        titles = ["s/step", "tok/s", "decides", *(["simulated"] if self._args.simulate else [])]
        table = _numbers("allocation_mode", *titles)
        simulated = self._simulated(candidates[: self._args.simulate + 1]) if self._args.simulate else []
        for one, more in itertools.zip_longest(candidates, simulated, fillvalue=""):
            assert not isinstance(one, str)
            numbers = f"{one.step.step_s:,.1f}", f"{one.step.num_tokens / one.step.step_s:,.0f}", one.step.decides
            table.add_row(str(one.needs.mode), *numbers, *([str(more)] if self._args.simulate else []))
        return table

    def _simulated(self, candidates: "Sequence[Candidate]") -> list[str]:
        """Return the seconds of a step in virtual time, and write the page."""
        from arealite.simulate.run import simulate

        asked = {str(one.needs.mode): one.asked for one in candidates if one.asked is not None}
        results = {name: simulate(one) for name, one in asked.items()}
        rows = [{"run": name} | row_of(asked[name], result) for name, result in results.items()]
        if self._args.page:
            drawn = {name: vars(result) for name, result in results.items()}
            write_page(self._args.page, self._args.config, rows, drawn, self._lengths)
        return [f"{row['step_s']:,.1f}" if "step_s" in row else row["decides"] for row in rows]

    def _advice(self, now: "Candidate | None", found: "Sequence[Candidate]") -> Iterator[str]:
        """Yield changes as keys to paste: those that make a step shorter or, of a run that does not fit, the three
        that fit and take least."""
        singles, fitting = [*self._changes(found[:1] if now else found)], dict[str, "Candidate"]()

        def judge(changes: Changes) -> None:
            one = self._judge(changes)
            if one is not None and one.needs.fit(self._memory):
                fitting[" ".join(f"{key}={value}" for key, value in changes.items())] = one

        for changes in singles:
            judge(changes)
        if not now and len(fitting) < _NUM_SHOWN:
            for first, second in itertools.combinations(singles, 2):
                if not any(f"{key}={value}" in fitting for key, value in (first | second).items()):
                    judge(first | second)
        most = _GAIN * now.step.step_s if now else math.inf
        best = [(words, one.step.step_s) for words, one in fitting.items() if one.step.step_s < most]
        best.sort(key=lambda item: (_OFFLOADS in item[0], item[1]))
        if not best:
            yield f"No key that was tried makes {'a step 5 % shorter' if now else 'it fit'}."
        for number, (words, seconds) in enumerate(best[:_NUM_SHOWN]):
            yield f"{'' if number else 'Faster:' if now else 'To fit:':8}{words}   # {seconds:,.1f} s"

    def _changes(self, found: "Sequence[Candidate]") -> Iterator[Changes]:
        """Yield changes to try."""
        config, (key, block) = self._config, self._config.trained
        yield from ({"allocation_mode": one.needs.mode} for one in found)
        if 0 < self._micro_batch < _MOST_TOKENS:
            yield {f"{key}.mb_spec.max_tokens_per_mb": self._micro_batch}
        if not block.gradient_checkpointing:
            yield {f"{key}.gradient_checkpointing": "true"}
        yield {f"{key}.optimizer.type": "adam_bf16"}
        if self._has_gpus:
            yield {f"{key}.{_OFFLOADS}": "true"}
        if isinstance(config, GRPOConfig):
            bound = config.rollout.max_head_offpolicyness
            yield {"rollout.max_head_offpolicyness": bound + 1}
            yield {"rollout.max_concurrent_rollouts": (bound + 1) * config.train_dataset.batch_size}
            if 0 < (most := self._longest - self._device.work.prompt) < config.gconfig.max_new_tokens:
                yield {"gconfig.max_new_tokens": most}

    def _compare(self, console: Console, run: RunFolder) -> None:
        """Print what a run measured beside its plan, and the layouts of worker groups if it had some."""
        from arealite.planner.memory import GIB

        with reading(run.metrics):
            rows = [row for row in read_jsonl(run.metrics) if "perf/memory_gib_weights" in row]
        require(bool(rows), f"--measured must be a run with an update: got none in {run.path}. Let it take a step.")
        rank = self._device.needs(load_config(str(run.config), [])).ranks[0]
        sizes = (rank.state["parameters"], rank.state.get("AdamW moments", 0), sum((rank.state | rank.on_gpu).values()))
        planned = _compared(*(size / GIB for size in sizes))
        measured = _compared(*(rows[-1][f"perf/memory_gib_{key}"] for key in ("weights", "moments", "max")))
        table = _numbers(f"GiB in {run.path}", "planned", "measured", "planned / measured")
        for name, size in planned.items():
            table.add_row(name, f"{size:.4f}", f"{measured[name]:.4f}", f"{size / max(measured[name], 1e-9):.2f}")
        console.print(table)
        if run.calls.exists():
            devices = self._args.nodes and self._args.nodes * max(1, self._config.cluster.n_gpus_per_node)
            plan_groups.show(console, self._config, run, devices)


def _compared(weights: float, moments: float, whole: float) -> dict[str, float]:
    """Return the terms of a rank's memory that a run measures."""
    step = whole - weights - moments
    return {"parameters": weights, "AdamW moments": moments, "gradients, activations": step, "all of a rank": whole}


def _numbers(name: str, *titles: str) -> Table:
    return Table(name, *(Column(title, justify="right") for title in titles), box=None, pad_edge=False)


def _seconds(now: "Candidate") -> Iterator[str]:
    """Yield the seconds of a step and what decides them."""
    step = now.step
    floors = ", ".join(f"{name} {seconds:,.1f} s" for name, seconds in step.floors.items())
    speed = f"{step.num_tokens / step.step_s:,.0f} tokens/s"
    yield f"A step of {step.num_tokens:,.0f} tokens takes {step.step_s:,.1f} s, {speed}."
    yield f"Decided by {step.decides}: {HELPS[step.decides]}"
    if step.publish_s:
        yield f"Alone they take: {floors}, each with {step.publish_s:,.1f} s of publication."


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number for which it holds, to half a percent; 0 if there is none."""
    low, high = 0, _MOST_TOKENS
    if fits(high):
        return high
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
