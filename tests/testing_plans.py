"""Run folders of runs with a graph, as their master leaves them, with calls of known lengths."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from arealite.api.cli_args import GRPOConfig, PPOConfig, WorkersConfig, load_expr_config
from arealite.api.config.loader import to_yaml
from arealite.api.run_folder import RunFolder
from arealite.cli.plan_groups import Measurement, simulate
from arealite.core.graph import DataFlowGraph
from arealite.core.records import CallLog, CallRecord
from arealite.launcher.plan.layout import make_layout

CONFIGS = Path(__file__).parents[1] / "examples" / "arealite" / "configs"
SECONDS = {"actor_inf": 2.0, "critic_inf": 3.0, "advantages": 1.0, "actor_train": 4.0, "critic_train": 5.0}
"""Of the calls of PPO on one rank."""


def ppo_config(*overrides: str) -> PPOConfig:
    argv = ["--config", str(CONFIGS / "gsm8k_ppo_cpu.yaml"), "actor.path=/model", *overrides]
    return load_expr_config(argv, PPOConfig)[0]


def on_one_rank(config: GRPOConfig, graph: DataFlowGraph, seconds: Mapping[str, float]) -> Measurement:
    """Return what a run of all roles on one rank would have measured of calls that take so long."""
    layout = make_layout(config.new(workers=WorkersConfig()), graph.engines)
    return Measurement(layout, 1, seconds, sum(seconds.values()), {}, is_bound_by_servers=False)


def write_run(
    folder: Path,
    config: GRPOConfig,
    graph: DataFlowGraph,
    seconds: Mapping[str, float],
    *,
    factors: Sequence[float] = (9.0, 1.0, 1.0, 1.0),
    rollout_s: float = 20.0,
) -> RunFolder:
    """Write a run whose calls take `factors` of their seconds on one rank, step after step."""
    run, layout = RunFolder(folder), make_layout(config, graph.engines)
    folder.mkdir(parents=True)
    run.config.write_text(to_yaml(config))
    log, rows = CallLog(run.calls), []
    for step, factor in enumerate(factors):
        slowed = {name: factor * one for name, one in seconds.items()}
        spans = simulate(graph, layout, on_one_rank(config, graph, slowed))
        log.append(record("actor.upload", step, "actor", "actor", 0.0, 1.0))
        for name, (begin, end) in spans.items():
            role = graph.named[name].role
            group = next(group.name for group in layout if role in group.roles)
            log.append(record(name, step, role, group, 100.0 + begin, 100.0 + end))
        length = rollout_s + max(end for _, end in spans.values()) + 1.0
        rows.append({"step": step, "time/rollout_s": rollout_s, "time/weights_s": 0.5, "time/step_s": length})
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def record(call: str, step: int, role: str, group: str, begin: float, end: float, attempt: int = 1) -> CallRecord:
    return CallRecord(step, call, role, group, begin, end, moved_mib=0.0, attempt=attempt, machines=("a",))
