"""The jobs of a run: one per inference server and one per rank of the trainer. Pure descriptions.

Every launcher starts the same jobs; a job's environment holds only what it has besides that of its node and of its run.
"""

import contextlib
import hashlib
import os
import shlex
import site
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import arealite
from arealite.api.alloc_mode import ParallelSizes
from arealite.api.cli_args import BaseExperimentConfig, GRPOConfig
from arealite.api.config.algorithm import describe_choices
from arealite.api.script import TRACEBACK_VARIABLE
from arealite.inference.backends.program import ServerProgram
from arealite.launcher.place.base import Job
from arealite.launcher.plan.layout import foreign_servers
from arealite.launcher.plan.plan import Placement, Plan, Run
from arealite.utils.network import LOOPBACK
from arealite.utils.processes import RESTART_VARIABLE

_SHOWN = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def server_job(config: BaseExperimentConfig, placement: Placement, host: str, gpus: Sequence[str]) -> Job:
    """Describe a server, which listens at `host` and picks its own port."""
    kind = config.server_kind
    command = ServerProgram(config).command(index=placement.index, num_gpus=max(1, len(placement.devices)))
    serve = [sys.executable, "-m", "arealite.launcher.serve", "--backend", kind.name]
    serve += ["--name", placement.name, "--host", host]
    env = environment(
        config.launcher.inference_server_env_vars,
        python=command[0],
        CUDA_VISIBLE_DEVICES=",".join(gpus),
        **({"OMP_NUM_THREADS": str(config.lite_threads)} if kind.is_embedded else {}),
        **(kind.sleep_env if config.rollout is not None and config.rollout.servers_sleep else {}),
    )
    return Job(placement.name, [*serve, "--", *command], env)


def trainer_job(
    run: Run, placement: Placement, gpus: Sequence[str], *, master: tuple[str, int | str], is_restart: bool
) -> Job:
    """Describe a rank of the trainer, with the variables that torchrun sets; `master` is where rank 0 listens."""
    beside, nodes = run.plan.ranks_on(placement.node), run.plan.trainer_nodes
    threads = trainer_threads(run.config, run.plan, num_ranks=run.plan.num_workers or len(beside))
    if run.config.launcher.trainer_threads is None:
        threads = int(os.environ.get("OMP_NUM_THREADS") or threads)
    env = environment(
        run.config.launcher.trainer_env_vars,
        CUDA_VISIBLE_DEVICES=",".join(gpus),
        OMP_NUM_THREADS=str(threads),
        RANK=str(placement.index),
        WORLD_SIZE=str(len(run.plan.trainers)),
        LOCAL_RANK=str(beside.index(placement)),
        LOCAL_WORLD_SIZE=str(len(beside)),
        GROUP_RANK=str(nodes.index(placement.node)),
        GROUP_WORLD_SIZE=str(len(nodes)),
        MASTER_ADDR=master[0],
        MASTER_PORT=str(master[1]),
        **{RESTART_VARIABLE: str(int(is_restart)), TRACEBACK_VARIABLE: os.environ.get(TRACEBACK_VARIABLE, "log")},
    )
    return Job(placement.name, [sys.executable, str(run.entry), *run.argv], env)


def plan_lines(run: Run, *, by: str) -> Iterator[str]:
    """Spell a plan for `--dry-run`: which process runs on which node with which GPUs, and how each kind starts."""
    config, plan = run.config, run.plan
    devices = f"{plan.gpus_per_node} GPUs each" if plan.gpus_per_node else "CPUs only"
    nodes = "1 node" if plan.num_nodes == 1 else f"{plan.num_nodes} nodes"
    yield f"{config.experiment_name}/{config.trial_name}: {config.allocation_mode} on {nodes}, {devices} ({by})"
    yield f"run folder: {run.folder.path}"
    if isinstance(config, GRPOConfig):
        yield f"actor: {describe_choices(config.actor)}"
    for node in plan.used_nodes:
        yield f"node {node}"
        servers = [(one,) for one in plan.servers if one.node == node]
        for alike in filter(None, [*servers, plan.ranks_on(node)]):
            name = alike[0].name if len(alike) == 1 else f"{alike[0].role}-{{{_span([one.index for one in alike])}}}"
            numbers = [device for one in alike for device in one.devices]
            gpus = f"GPU {_span(numbers):<4}  " if numbers else ""
            yield f"  {name:<14} {gpus}log {name}.log"
    if samples_in_trainer(config):
        yield "trainer-0 also samples: its process runs the server lite, on its own parameters"
    yield from _group_lines(run)
    if not plan.groups and plan.trainers and config.allocation is not None:
        yield from mesh_lines(config.allocation.train)
    num_gpus = plan.num_nodes * plan.gpus_per_node
    if idle := num_gpus - plan.num_gpus:
        yield f"{idle} of {num_gpus} GPUs stay idle"
    if foreign := foreign_servers(config):
        yield f"servers of others: {','.join(foreign)}"
    jobs = [server_job(config, one, f"<node {one.node}>", []) for one in plan.servers[:1]]
    for one in plan.trainers[:1]:
        jobs.append(trainer_job(run, one, [], master=(f"<node {one.node}>", "<a free port>"), is_restart=False))
    for job in jobs:
        words = [f"{name}={job.env[name]}" for name in _SHOWN if name in job.env]
        for word in job.command:
            word = "python" if word == sys.executable else word
            words.append(word if word.startswith("<") else shlex.quote(word))
        yield f"{job.name} runs"
        yield "  " + " ".join(words)


def samples_in_trainer(config: BaseExperimentConfig) -> bool:
    """Return whether the trainer's process runs the server."""
    rollout = config.rollout
    return rollout is not None and rollout.colocated is not None and not rollout.replay_from


def _group_lines(run: Run) -> Iterator[str]:
    """Spell the groups of workers that a master starts."""
    config, plan = run.config, run.plan
    if plan.groups:
        yield "workers of trainer-0, on nodes that Ray chooses"
    for group in plan.groups:
        name = f"{group.name}-0" if group.num_ranks == 1 else f"{group.name}-{{{_span(range(group.num_ranks))}}}"
        shape = f"{group.sizes}, " if group.sizes != ParallelSizes(data=group.num_ranks) else ""
        gpus = f"{group.num_gpus} GPUs, " if group.num_gpus > 1 else "1 GPU, " if group.num_gpus else ""
        threads = group.threads or trainer_threads(config, plan, num_ranks=plan.num_workers)
        needs = f"{shape}{gpus}{threads} {'thread' if threads == 1 else 'threads'} each, {group.strategy}"
        yield f"  {name:<14} {needs}, for {', '.join(group.roles)}  log {name}.log"


_SHOWN_GROUPS = 4


def mesh_lines(sizes: ParallelSizes) -> Iterator[str]:
    """Spell which ranks of a trainer divide what: for each size above 1, the groups that exchange it."""
    below = {"t": 1, "c": sizes.tensor, "d": sizes.tensor * sizes.context}  # distance of two ranks of a group
    below |= {"p": below["d"] * sizes.data, "e": 1}
    dimensions = {
        "p": (sizes.pipeline, "layers"),
        "d": (sizes.data, "rows, state"),
        "c": (sizes.context, "tokens, heads"),
        "t": (sizes.tensor, "matrices, vocabulary"),
        "e": (sizes.expert, "experts"),
    }
    if sizes.world_size > 1:
        yield f"trainer {sizes}: {sizes.world_size} ranks divide"
    for letter, (size, what) in dimensions.items():
        step = below[letter]
        firsts = [rank for rank in range(sizes.world_size) if rank // step % size == 0]
        groups = [_group(range(first, first + size * step, step)) for first in firsts[:_SHOWN_GROUPS]]
        more = f"  ... ({len(firsts)} groups)" if len(firsts) > _SHOWN_GROUPS else ""
        if size > 1:
            yield f"  {f'{letter}{size}':<4} {what:<20} ranks {'  '.join(groups)}{more}"


def _group(ranks: range) -> str:
    """Spell equally distant ranks as `0-7`, `0,4` or `0,2..14`."""
    if ranks.step == 1:
        return _span(ranks)
    return ",".join(map(str, ranks)) if len(ranks) < 4 else f"{ranks[0]},{ranks[1]}..{ranks[-1]}"


def trainer_threads(config: BaseExperimentConfig, plan: Plan, *, num_ranks: int) -> int:
    """Return how many threads each of the `num_ranks` ranks of a node gets: what was asked for, or a share of the
    cores that servers leave, unless those rest meanwhile; threads that compete for a core are many times slower."""
    if config.launcher.trainer_threads is not None:
        return config.launcher.trainer_threads
    if plan.num_nodes > 1:
        return config.launcher.trainer_cpus_per_gpu
    foreign = [one for one in foreign_servers(config) if one.startswith((LOOPBACK, "localhost"))]
    num_servers = 0 if config.lite_takes_turns else len(plan.servers) + len(foreign) + samples_in_trainer(config)
    cores = len(os.sched_getaffinity(0)) - num_servers * config.lite_threads
    return max(1, cores // num_ranks)


def environment(user_variables: str, *, python: str = sys.executable, **ours: str) -> dict[str, str]:
    """Return what jobs have besides their node's variables: `ours`, the user's `A=1,B=2`, and where `python` finds us.

    Another interpreter than ours must not find what else is installed beside us, but its own programs first.
    """
    env = {"TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "true"), "PYTHONUNBUFFERED": "1"} | ours
    env |= dict(pair.split("=", 1) for pair in user_variables.split(",") if pair)
    is_foreign = python != sys.executable
    package_root = Path(arealite.__file__).parents[1]
    is_installed = str(package_root) in [*site.getsitepackages(), site.getusersitepackages()]
    if is_foreign:
        env["PATH"] = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", os.defpath)])
    if is_foreign or not is_installed:
        folder = _folder_of_package() if is_installed else package_root
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return env


def _folder_of_package() -> Path:
    """Return a folder with nothing but this package in it: a link in the user's cache."""
    package = Path(arealite.__file__).parent
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "arealite" / f"package-{hashlib.blake2b(str(package).encode(), digest_size=6).hexdigest()}"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / package.name).symlink_to(package, target_is_directory=True)
    return folder


def _span(consecutive: Sequence[int]) -> str:
    """Spell numbers as `0-3`."""
    first, last = consecutive[0], consecutive[-1]
    return str(first) if first == last else f"{first}-{last}"
