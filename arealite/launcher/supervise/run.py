"""What all launchers share: from a command line to a run that is watched to its end, and started again if it may be."""

import argparse
import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from arealite.api.errors import ConfigError
from arealite.api.run_folder import OF_TRIAL
from arealite.inference.backends import kind_of
from arealite.launcher.place.base import Job, Place, Slot
from arealite.launcher.plan.jobs import plan_lines, server_job, trainer_job
from arealite.launcher.plan.plan import Placement, Run, foreign_servers, setup_timeout_s, trains
from arealite.launcher.supervise.supervisor import CONFIG_FAILED, NODE_LOST, ServerPolicy, Supervisor, pause_s
from arealite.utils.environment import REGISTRY_VARIABLE, SECRET_VARIABLE, SERVER_ADDRS_VARIABLE
from arealite.utils.files import empty_folder, file_lock, write_atomically, writing
from arealite.utils.registry import Registry
from arealite.utils.secret import ensure_secret
from arealite.watchdog.stall import StallPolicy

_LOCK_TIMEOUT_S = 5.0
"""How long another launcher of the same run may take to end."""
EPILOG = (
    "exit status: 0 done, 2 config error, 3 a server ended, 4 the run stalled, 5 a node was lost, "
    "128 + n a signal, else the failed rank's"
)


def main(argv: Sequence[str] | None, place: Place, *, name: str, description: str) -> int:
    """Run the command line of a launcher that starts the run itself, and return its exit status."""

    def act(run: Run, args: argparse.Namespace) -> int:
        if args.dry_run:
            print("\n".join(plan_lines(run, by=name)))
            return 0
        return launch(run, place)

    return command(argv, act, prog=f"arealite.launcher.{name.lower()}", description=description)


def command(
    argv: Sequence[str] | None,
    act: Callable[[Run, argparse.Namespace], int],
    *,
    prog: str,
    description: str,
    epilog: str = EPILOG,
    flags: Mapping[str, str] | None = None,
) -> int:
    """Parse the command line that all launchers have and `act` on it; `flags` are more than `--dry-run`."""
    parser = argparse.ArgumentParser(prog=f"python3 -m {prog}", description=description, epilog=epilog)
    parser.add_argument("entry", help="script with the training loop, e.g. examples/arealite/gsm8k_grpo.py")
    parser.add_argument("--config", metavar="FILE.yaml", required=True, help="config of the experiment")
    parser.add_argument("--dry-run", action="store_true", help="print what would run where, and start nothing")
    for flag, text in (flags or {}).items():
        parser.add_argument(flag, action="store_true", help=text)
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="keys of the experiment to change")
    args = parser.parse_intermixed_args(argv)
    return settle(args.entry, ["--config", args.config, *args.overrides], lambda run: act(run, args))


def settle(entry: str | Path, argv: Sequence[str], act: Callable[[Run], int]) -> int:
    """Read and check a command line and return what `act` makes of it; a ConfigError is printed, and exit status 2."""
    try:
        return act(Run.load(entry, argv))
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return CONFIG_FAILED


def launch(run: Run, place: Place, *, restart: str | None = None, lock_timeout_s: float = _LOCK_TIMEOUT_S) -> int:
    """Start a run, wait for its end and return the launcher's exit status. Raises ConfigError before anything starts.

    `restart` tells why this is not the first start of the run, if it is not. Must be called from the main thread, which
    takes SIGINT and SIGTERM meanwhile: a caller that gets 128 or more should end as well. The caller's other child
    processes must not be started meanwhile.
    """
    place.check(run.config, run.plan)
    _check_resume(run)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(run.folder.launcher_lock, timeout_s=lock_timeout_s))
            secret = _prepare_folder(run, is_restart=restart is not None)
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from error
        return asyncio.run(_run(run, place, secret, restart))


def _prepare_folder(run: Run, *, is_restart: bool) -> str:
    """Write what the run needs before anything starts, and return its secret. Raises OSError and ValueError."""
    folder = run.folder
    resumes = run.config.recover.mode in ("auto", "resume") and folder.newest_checkpoint >= 0
    if trains(run.config) and not is_restart and not resumes:
        with file_lock(folder.trainer_lock, timeout_s=_LOCK_TIMEOUT_S):  # a trainer may have been started by hand
            empty_folder(folder.path, keep=OF_TRIAL)
    with writing(folder.logs):
        folder.logs.mkdir(parents=True, exist_ok=True)
    argv = [re.sub(r"(_env_vars=).*", r"\1***", word, flags=re.DOTALL) for word in run.argv]
    record = {"entry": str(run.entry), "argv": argv}
    write_atomically(folder.command, json.dumps(record) + "\n", mode=0o600)  # `arealite replay` reads it
    return ensure_secret(folder.path)


async def _run(run: Run, place: Place, secret: str, restart: str | None) -> int:
    """Run to the end, and start again what failed as often as `recover` allows without a new checkpoint."""
    config, folder = run.config, run.folder
    registry = Registry(secret)
    try:
        if run.plan.servers:
            try:
                await registry.start(place.registry_host(run.plan), folder.registry)
            except OSError as error:
                raise ConfigError(str(error)) from error
        retries = config.recover.retries if config.recover.mode in ("auto", "fault") else 0
        num_restarts, progress = 0, folder.newest_checkpoint
        while True:
            supervisor = await _attempt(run, place, secret, registry, restart, pause_s(num_restarts))
            end = supervisor.exit_reason  # a signal while everything was being stopped counts as well
            if folder.newest_checkpoint > progress:
                num_restarts, progress = 0, folder.newest_checkpoint
            if not end.is_failure or end.status == CONFIG_FAILED or end.is_refusal or num_restarts == retries:
                return end.status
            num_restarts += 1
            restart = f"restart {num_restarts} of {retries}, because {end.reason}"
            if not await asyncio.to_thread(place.nodes_answer):
                return NODE_LOST
    finally:
        await registry.close()


async def _attempt(
    run: Run, place: Place, secret: str, registry: Registry, restart: str | None, delay_s: float
) -> Supervisor:
    """Start everything at once and supervise it to its end; `restart` tells why it is not the first time."""
    config, plan, logs = run.config, run.plan, run.folder.logs
    stall = StallPolicy(
        timeout_s=config.launcher.stall_timeout,
        setup_timeout_s=setup_timeout_s(config),
        on_stall=config.launcher.on_stall,
        foreign_servers={address: address for address in foreign_servers(config)},
        secret=secret,
    )
    env = {SECRET_VARIABLE: secret, REGISTRY_VARIABLE: registry.address}
    try:
        async with Supervisor(log_folder=logs, stall=stall, env=env) as supervisor:
            supervisor.log(restart or f"{config.allocation_mode}; logs in {logs}")
            await supervisor.pause(delay_s)
            place.open(config, plan, supervisor.log)
            slots = await supervisor.take_slots(place, plan.placements)
            if slots is not None:
                by_placement = dict(zip(plan.placements, slots, strict=True))
                if plan.servers:
                    servers = [(one, by_placement[one]) for one in plan.servers]
                    supervisor.start_servers(servers, _server_policy(run, place, registry))
                if plan.trainers:
                    supervisor.start_trainer(_trainer_jobs(run, by_placement, is_restart=restart is not None))
            await supervisor.wait()
        return supervisor
    finally:
        await place.close()


def _trainer_jobs(run: Run, slots: Mapping[Placement, Slot], *, is_restart: bool) -> list[tuple[Slot, Job]]:
    """Return each rank's slot and job. Ranks see all GPUs of the ranks on their node, because NCCL links only GPUs
    that both sides see; LOCAL_RANK picks one."""
    first = slots[run.plan.trainers[0]]
    jobs = []
    for one in run.plan.trainers:
        gpus = [gpu for rank in run.plan.ranks_on(one.node) for gpu in slots[rank].gpus]
        job = trainer_job(run, one, gpus, master=(first.address, first.port), is_restart=is_restart)
        jobs.append((slots[one], job))
    return jobs


def _server_policy(run: Run, place: Place, registry: Registry) -> ServerPolicy:
    invitation = f"export {SECRET_VARIABLE}=$(cat {run.folder.secret}) {SERVER_ADDRS_VARIABLE}="
    return ServerPolicy(
        place=place,
        describe=lambda placement, slot: server_job(run.config, placement, slot.address, slot.gpus),
        setup_timeout_s=setup_timeout_s(run.config),
        restarts=run.config.launcher.server_restarts,
        progress=lambda: run.folder.newest_checkpoint,
        registry=registry,
        publish_progress=kind_of(run.config).is_embedded,
        invitation=None if run.plan.trainers else f"servers only, until Ctrl-C: {invitation}",
    )


def _check_resume(run: Run) -> None:
    """Refuse to resume what has no checkpoint, before anything starts; whether one is whole is the trainer's to say."""
    folder = run.folder.recover
    if run.config.recover.mode == "resume" and run.folder.newest_checkpoint < 0:
        raise ConfigError(
            f"{folder} must hold a checkpoint for recover.mode=resume: got none. Set recover.mode=auto to start afresh."
        )
