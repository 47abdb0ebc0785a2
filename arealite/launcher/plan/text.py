"""A plan as text, for `--dry-run`: which process runs on which node with which devices, and how each kind starts."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence

from arealite.launcher.plan.jobs import server_job, trainer_job
from arealite.launcher.plan.plan import Run, foreign_servers

_SHOWN_VARIABLES = (
    *("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)


def plan_lines(run: Run, *, by: str) -> Iterator[str]:
    """Tell all of a plan."""
    config, plan = run.config, run.plan
    devices = f"{plan.gpus_per_node} GPUs each" if plan.gpus_per_node else "CPUs only"
    nodes = "1 node" if plan.num_nodes == 1 else f"{plan.num_nodes} nodes"
    yield f"{config.experiment_name}/{config.trial_name}: {config.allocation_mode} on {nodes}, {devices} ({by})"
    yield f"run folder: {run.folder.path}"
    for node, placements in itertools.groupby(sorted(plan.placements, key=lambda one: one.node), lambda one: one.node):
        yield f"node {node}"
        servers = [(one,) for one in placements if one.role == "server"]
        for alike in filter(None, [*servers, plan.ranks_on(node)]):
            numbers = _spans([one.index for one in alike])
            name = alike[0].name if len(alike) == 1 else f"{alike[0].role}-{{{numbers}}}"
            gpu_numbers = _spans([device for one in alike for device in one.devices])
            gpus = f"GPU {gpu_numbers:<4}  " if gpu_numbers else ""
            yield f"  {name:<14} {gpus}log {name}.log"
    idle = plan.num_nodes * plan.gpus_per_node - sum(len(one.devices) for one in plan.placements)
    if idle > 0:
        yield f"{idle} of {plan.num_nodes * plan.gpus_per_node} GPUs stay idle"
    if foreign := foreign_servers(config):
        yield f"servers of someone else: {foreign}"
    jobs = [server_job(config, one, f"<node {one.node}>", {}) for one in plan.servers[:1]]
    for one in plan.trainers[:1]:
        jobs.append(trainer_job(run, one, {}, master=(f"<node {one.node}>", "<a free port>"), is_restart=False))
    for job in jobs:
        variables = [f"{name}={job.env[name]}" for name in _SHOWN_VARIABLES if name in job.env]
        yield f"{job.name} runs"
        yield "  " + " ".join([*variables, _spelled(job.command)])


def _spelled(command: Iterable[str]) -> str:
    """Spell a command so that it can be read; our own interpreter is `python`."""
    words = ["python" if word == sys.executable else word for word in command]
    return " ".join(word if word.startswith("<") else shlex.quote(word) for word in words)


def _spans(numbers: Sequence[int]) -> str:
    """Spell ascending numbers as `0-3,5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ",".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
