"""`arealite plan-core`: which layout of worker groups would make a step faster, by a model of what runs measured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Column, Table

from arealite.api.cli_args import (
    BaseExperimentConfig,
    GRPOConfig,
    PPOConfig,
    SFTConfig,
    WorkersConfig,
    load_expr_config,
)
from arealite.api.config.loader import given_value
from arealite.api.errors import require
from arealite.api.run_folder import RunFolder
from arealite.cli.plan_core import prediction
from arealite.cli.plan_core.prediction import Cost, Interval, Layout, Measurement
from arealite.core import experiments
from arealite.core.graph import DataFlowGraph
from arealite.launcher.plan.layout import make_layout
from arealite.utils.terminal import listed

SERIAL_SHARES = (0.0, 0.1, 0.3)
"""Of a measured call, assumed where runs don't tell; the one in the middle ranks."""
_NUM_SHOWN = 5
_CHANGE = "Give the folder of a run of this config."


@dataclass(frozen=True)
class _Plan:
    """A layout, the YAML's block for it, and its predicted steps by assumed serial share."""

    layout: Layout
    workers: WorkersConfig
    steps: Sequence[Mapping[str, Interval]]

    @property
    def graph_s(self) -> list[float]:
        """Seconds of the calls of a step."""
        return [max(one.end for one in step.values()) for step in self.steps]

    def rank(self, index: int) -> tuple[float, int, int]:
        """Order layouts by a predicted time, and equal ones by what they need."""
        return self.graph_s[index], sum(group.num_ranks for group in self.layout), len(self.layout)

    def __str__(self) -> str:
        return ", ".join(f"{'+'.join(group.roles)} {group.num_ranks}" for group in self.layout)


def plan_core(config_file: str, overrides: Sequence[str], run_folders: Sequence[str], num_devices: int | None) -> int:
    """Print the layouts with the shortest predicted steps, by the costs of some runs, and return 0."""
    config, graph = _load(config_file, overrides)
    runs = [_measure(RunFolder(folder), config, graph) for folder in run_folders]
    own = make_layout(config, graph.engines)
    assumed = prediction.not_fitted(graph, runs)
    shares = SERIAL_SHARES if assumed else (0.0,)
    middle = len(shares) // 2
    prices = [prediction.costs(graph, runs, serial_share=share) for share in shares]

    def plan(layout: Layout, workers: WorkersConfig) -> _Plan:
        return _Plan(layout, workers, [prediction.simulate(graph, layout, price) for price in prices])

    choices = prediction.layouts(config, graph, num_devices or sum(group.num_ranks for group in own))
    found = [plan(layout, workers) for workers, layout in choices]
    found.sort(key=lambda one: one.rank(middle))
    measured = [plan(run.layout, WorkersConfig()) for run in runs]
    named = {"as run": measured[0]} | ({} if own == runs[0].layout else {"config": plan(own, WorkersConfig())})
    console = Console(highlight=False)
    for run, guess in zip(runs, measured):
        seconds = guess.graph_s[middle]
        error = f"predicted {seconds:.3f} s ({seconds / run.graph_s - 1:+.1%})"
        told = f"{run.path}: {guess}; {run.num_steps} steps, calls measured {run.graph_s:.3f} s, {error}"
        console.print(told, soft_wrap=True)
    rows = named | {str(number): one for number, one in enumerate(found[:_NUM_SHOWN], start=1)}
    console.print(_table(rows, shares, runs[0]))
    console.print("\n".join(_remarks(found, shares, prices[middle], runs[0], assumed)), soft_wrap=True)
    block = yaml.safe_dump(
        {"workers": found[0].workers.model_dump(exclude_defaults=True)}, default_flow_style=None, sort_keys=False
    )
    console.print(f"\n{block}", end="", markup=False, soft_wrap=True)
    return 0


def _load(config_file: str, overrides: Sequence[str]) -> tuple[BaseExperimentConfig, DataFlowGraph]:
    """Return a config, of the class that its blocks tell, and the graph that `training/` has for it."""
    argv = ["--config", config_file, *overrides]
    if given_value("model", config_file, overrides) is not None:
        return load_expr_config(argv, SFTConfig)[0], experiments.sft()
    if given_value("critic", config_file, overrides) is not None:
        ppo = load_expr_config(argv, PPOConfig)[0]
        return ppo, experiments.ppo(ppo)
    grpo = load_expr_config(argv, GRPOConfig)[0]
    return grpo, experiments.grpo(grpo)


def _measure(run: RunFolder, config: BaseExperimentConfig, graph: DataFlowGraph) -> Measurement:
    """Measure a run that did the work of a config; ranks of its groups are those of its own config."""
    require(run.config.exists(), f"costs must be a run folder with config.yaml: got none in {run.path}. {_CHANGE}")
    theirs, _ = _load(str(run.config), [])
    had = _work(theirs)
    for key, value in _work(config).items():
        told = f"costs must be of a run with the config's {key}, {value}: got {had.get(key)} in {run.path}. {_CHANGE}"
        require(had.get(key) == value, told)
    return prediction.measure(run, theirs, graph)


def _work(config: BaseExperimentConfig) -> dict[str, Any]:
    """Return by key what must be equal for calls to take equally long, and servers to be waited for equally long."""
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


def _table(rows: Mapping[str, _Plan], shares: Sequence[float], run: Measurement) -> Table:
    """Return the seconds of calls and steps of layouts; the first one is that of the run."""
    titles = [f"calls,\n{share:.0%}" if len(shares) > 1 else "calls" for share in shares]
    columns = [Column(title, justify="right") for title in (*titles, "step", "change")]
    title = f"Seconds of a step{', by how much of its calls is serial' if len(shares) > 1 else ''}"
    table = Table("", "layout", *columns, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    before, *_ = [one.graph_s[len(shares) // 2] for one in rows.values()]
    for name, one in rows.items():
        step = run.step_s(one.graph_s[len(shares) // 2] - before)
        calls = (f"{seconds:.3f}" for seconds in one.graph_s)
        table.add_row(name, str(one), *calls, f"{step:.3f}", f"{step / run.step_s(0.0) - 1:+.1%}")
    return table


def _remarks(
    found: Sequence[_Plan], shares: Sequence[float], price: Mapping[str, Cost], run: Measurement, assumed: Sequence[str]
) -> Iterator[str]:
    """Yield what a reader of the table must know."""
    best = found[0].steps[len(shares) // 2]
    path = [f"{name} {best[name].end - best[name].begin:.3f} s" for name in prediction.critical_path(best)]
    yield f"Critical path of 1: {', '.join(path)}."
    parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in run.timers.items() if name != "step")
    yield f"Steps of {run.path} took {run.timers['step']:.3f} s, of them {parts}."
    if run.is_bound_by_servers:
        yield "That run waited for its servers: no layout makes such steps shorter, more servers may."
    if rigid := [name for name, cost in price.items() if cost.parallel == 0]:
        yield f"More ranks made {listed(rigid)} no faster."
    if assumed:
        yield f"What part of {listed(assumed)} is serial is assumed: the costs have one number of ranks. Add others."
        for index, share in enumerate(shares):
            yield f"If {share:.0%} is serial, the best is {min(found, key=lambda one: one.rank(index))}."
