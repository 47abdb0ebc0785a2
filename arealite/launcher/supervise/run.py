"""What all launchers share: from a command line to a run that is watched to its end, and started again if it may be.

A launcher is its own command plus a `Backend`: what it calls itself, what it checks of its nodes, and the place that
gives slots there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.config.run import load_run_config
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.inference.backends import kind_of
from arealite.launcher.place.base import Job, Place, Slot
from arealite.launcher.plan.jobs import check_model, server_job, trainer_job
from arealite.launcher.plan.plan import Placement, Plan, foreign_servers, make_plan, rollout_of
from arealite.launcher.plan.text import plan_lines
from arealite.launcher.supervise.supervisor import CONFIG_FAILED, NODE_LOST, ServerPolicy, Supervisor
from arealite.utils.environment import SECRET_VARIABLE, SERVER_ADDRS_VARIABLE
from arealite.utils.file_lock import file_lock
from arealite.utils.files import write_atomically
from arealite.utils.network import LOOPBACK
from arealite.utils.registry import Registry
from arealite.utils.secret import ensure_secret
from arealite.watchdog.stall import StallPolicy

_SETUP_TIMEOUT_S = 600.0
"""Of fine-tuning, whose start is the loading of its model."""
_LOCK_TIMEOUT_S = 5.0
"""How long another launcher of the same run may take to end."""
EPILOG = (
    "exit status: 0 done, 2 config error, 3 a server ended, 4 the run stalled, 5 a node was lost, "
    "128 + n a signal, else the failed rank's"
)


@dataclass(frozen=True)
class Backend:
    """What is a launcher's own."""

    name: str
    """As in `by Ray`."""
    open_place: Callable[[BaseExperimentConfig, Plan, Supervisor], Place]
    """Called anew for each attempt."""
    check: Callable[[BaseExperimentConfig, Plan], None]
    """Refuses by ConfigError what the nodes can't do, before anything starts."""
    registry_host: Callable[[Plan], str] = lambda plan: LOOPBACK
    """Address of this node by which the jobs of a plan reach the run's registry."""
    nodes_answer: Callable[[], bool] = lambda: True
    """Whether a run that has lost a node may start again on those it has, or on others that replace them."""


def parse(
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    epilog: str = EPILOG,
    flags: Mapping[str, str] | None = None,
) -> argparse.Namespace:
    """Parse the command line that all launchers have: entry, argv (of the entry) and dry_run; `flags` are more."""
    parser = argparse.ArgumentParser(prog=prog, description=description, epilog=epilog)
    parser.add_argument("entry", help="script with the training loop, e.g. examples/arealite/gsm8k_grpo.py")
    parser.add_argument("--config", metavar="FILE.yaml", required=True, help="config of the experiment")
    parser.add_argument("--dry-run", action="store_true", help="print what would run where, and start nothing")
    for flag, text in (flags or {}).items():
        parser.add_argument(flag, action="store_true", help=text)
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="keys of the experiment to change")
    args = parser.parse_intermixed_args(argv)
    args.argv = ["--config", args.config, *args.overrides]
    return args


def dry_run(entry: str | Path, argv: Sequence[str], *, by: str) -> int:
    """Print the plan of a run."""
    try:
        config = load_run_config(argv, entry_script(entry))
        plan = checked_plan(config)
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return CONFIG_FAILED
    print("\n".join(plan_lines(config, plan, by=by, entry=entry, argv=argv)))
    return 0


def launch(entry: str | Path, argv: Sequence[str], backend: Backend, *, restart: str | None = None) -> int:
    """Run `entry` with `--config FILE key=value ...`, wait for its end and return the launcher's exit status.

    `restart` tells why this is not the first start of the run, if it is not. Must be called from the main thread, which
    takes SIGINT and SIGTERM meanwhile: a caller that gets 128 or more should end as well. The caller's other child
    processes must not be started meanwhile.
    """
    with contextlib.ExitStack() as held:
        try:
            entry = entry_script(entry)
            config = load_run_config(argv, entry)
            plan = checked_plan(config)
            backend.check(config, plan)
            _check_resume(config)
            held.enter_context(file_lock(RunFolder(config).launcher_lock, timeout_s=_LOCK_TIMEOUT_S))
        except (ConfigError, TimeoutError) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return CONFIG_FAILED
        return asyncio.run(_run(_Run(config, plan, entry, list(argv), backend), restart))


def checked_plan(config: BaseExperimentConfig) -> Plan:
    """Return the plan, after every check that needs no node of the run."""
    plan = make_plan(config)
    check_model(config)
    if plan.servers:
        kind_of(config).check_block(config)
    return plan


def setup_timeout_s(config: BaseExperimentConfig) -> float:
    """Return how long nodes may take to be there, and servers to be ready."""
    return config.rollout.setup_timeout if config.rollout is not None else _SETUP_TIMEOUT_S


def entry_script(entry: str | Path) -> Path:
    """Return the absolute path of the script, which must be a file."""
    path = Path(entry)
    if not path.is_file():
        raise ConfigError(f"the entry script must be a file: got {entry}, which does not exist. Correct its path.")
    return path.resolve()


@dataclass(frozen=True)
class _Run:
    """One command line, settled."""

    config: BaseExperimentConfig
    plan: Plan
    entry: Path
    argv: list[str]
    backend: Backend

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.config)


async def _run(run: _Run, restart: str | None) -> int:
    """Run to the end, and start again what failed as often as `recover` allows."""
    config, folder = run.config, run.folder
    if not folder.recover.exists() and restart is None:
        for log in folder.logs.glob("*.log"):  # of a run that this one replaces
            log.unlink()
    folder.path.mkdir(parents=True, exist_ok=True)
    record = {"entry": str(run.entry), "argv": run.argv}
    write_atomically(folder.command, json.dumps(record) + "\n")  # `arealite replay` reads it
    secret = ensure_secret(folder.path)
    registry = Registry(secret)
    try:
        if run.plan.servers:
            await registry.start(run.backend.registry_host(run.plan), folder.registry)
        retries = config.recover.retries if config.recover.mode in ("auto", "fault") else 0
        for attempt in range(retries + 1):
            supervisor = await _attempt(run, secret, registry, restart)
            end = supervisor.exit_reason  # a signal while everything was being stopped counts as well
            restart = f"restart {attempt + 1} of {retries}, because {end.reason}"
            if not end.is_failure or end.status == CONFIG_FAILED or end.is_refusal:
                break
            if not await asyncio.to_thread(run.backend.nodes_answer):
                return NODE_LOST
        return end.status
    finally:
        await registry.close()


async def _attempt(run: _Run, secret: str, registry: Registry, restart: str | None) -> Supervisor:
    """Start everything at once and supervise it to its end; `restart` tells why it is not the first time."""
    config, plan = run.config, run.plan
    log_folder = run.folder.logs
    log_folder.mkdir(parents=True, exist_ok=True)
    place: Place | None = None
    try:
        async with Supervisor(log_folder=log_folder, stall=_stall_policy(run, secret)) as supervisor:
            supervisor.log(restart or f"{config.allocation_mode}; logs in {log_folder}")
            place = run.backend.open_place(config, plan, supervisor)
            slots = await supervisor.take_slots(place, plan.placements)
            if slots is not None:
                by_name = {one.name: slot for one, slot in zip(plan.placements, slots, strict=True)}
                if plan.servers:
                    _start_servers(run, supervisor, place, by_name, secret, registry)
                if plan.trainers:
                    is_restart = restart is not None
                    jobs = _trainer_jobs(run, by_name, secret, registry.address, is_restart=is_restart)
                    supervisor.start_trainer(jobs)
            await supervisor.wait()
        return supervisor
    finally:
        if place is not None:
            await place.close()


def _trainer_jobs(
    run: _Run, slots: Mapping[str, Slot], secret: str, registry: str, *, is_restart: bool
) -> list[tuple[Slot, Job]]:
    """Return each rank's slot and job. Ranks see all GPUs of the ranks on their node, because NCCL links only GPUs
    that both sides see; LOCAL_RANK picks one."""
    plan, first = run.plan, slots[run.plan.trainers[0].name]
    jobs = []
    for one in plan.trainers:
        gpus = [gpu for rank in plan.ranks_on(one.node) for gpu in slots[rank.name].gpus]
        job = trainer_job(
            *(run.config, plan, one, _visible(gpus), secret, registry),
            master=(first.address, first.port),
            entry=run.entry,
            argv=run.argv,
            is_restart=is_restart,
        )
        jobs.append((slots[one.name], job))
    return jobs


def _visible(gpus: Sequence[str]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def _start_servers(
    run: _Run, supervisor: Supervisor, place: Place, slots: Mapping[str, Slot], secret: str, registry: Registry
) -> None:
    config, servers = run.config, run.plan.servers
    rollout = rollout_of(config)

    def describe(placement: Placement, slot: Slot) -> Job:
        return server_job(config, placement, slot.address, _visible(slot.gpus), secret, registry.address)

    policy = ServerPolicy(
        setup_timeout_s=rollout.setup_timeout,
        restarts=config.launcher.server_restarts,
        registry=registry,
        publish_progress=kind_of(config).is_embedded,
        invitation=None
        if run.plan.trainers
        else f"servers only, until Ctrl-C: export {SECRET_VARIABLE}=$(cat "
        f"{run.folder.secret}) {SERVER_ADDRS_VARIABLE}=",
    )
    supervisor.start_servers(place, servers, [slots[one.name] for one in servers], describe, policy)


def _check_resume(config: BaseExperimentConfig) -> None:
    """Refuse to resume what has no checkpoint, before anything starts; whether one is whole is the trainer's to say."""
    folder = RunFolder(config).recover
    if config.recover.mode == "resume" and not any(folder.glob("step_*")):
        raise ConfigError(
            f"{folder} must hold a checkpoint for recover.mode=resume: got none. Set recover.mode=auto to start afresh."
        )


def _stall_policy(run: _Run, secret: str) -> StallPolicy:
    """Servers must become ready in `setup_timeout` anyhow; that is then also what the start of ranks may take."""
    foreign = foreign_servers(run.config)
    return StallPolicy(
        timeout_s=run.config.launcher.stall_timeout,
        setup_timeout_s=setup_timeout_s(run.config),
        on_stall=run.config.launcher.on_stall,
        foreign_servers={address: address for address in foreign.split(",") if address},
        secret=secret,
    )
