"""The common part of all launchers: from a command line to the end of a run, with its restarts."""

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import yaml

from arealite.api.cli_args import to_yaml
from arealite.api.config.run import declared_check, load_run_config
from arealite.api.errors import NODE_LOST, REFUSED, ConfigError, require_linux
from arealite.api.run_folder import OF_TRIAL
from arealite.api.script import show_refusal
from arealite.inference.registry import Registry
from arealite.launcher.place.base import Place
from arealite.launcher.plan.jobs import environment, plan_lines
from arealite.launcher.plan.plan import Run, checked_plan, entry_script, setup_timeout_s, trains
from arealite.launcher.supervise.supervisor import Supervisor, pause_s
from arealite.utils.files import empty_folder, file_lock, reading, require_object, write_atomically, writing
from arealite.utils.processes import describe_exit, exit_status
from arealite.utils.secret import ensure_secret
from arealite.utils.terminal import Parser, until_reader_leaves

_PROBLEMS = 1  # exit status of the check
_LOCK_TIMEOUT_S = 5.0  # how long another launcher of the same run may take to end
EPILOG = (
    "exit status: 0 done, 2 config error, 3 a server ended, 4 the run stalled, 5 a node was lost, "
    "6 ranks lost each other, 128 + n a signal, else the failed rank's"
)


def main(argv: Sequence[str] | None, place: Place, *, name: str, description: str) -> int:
    """Run the command line of a launcher that starts the run itself, and return its exit status."""
    prog = f"arealite.launcher.{name.lower()}"
    return command(argv, lambda run, _: launch(run, place), prog=prog, description=description, by=name)


@until_reader_leaves()
def command(
    argv: Sequence[str] | None,
    act: Callable[[Run, argparse.Namespace], int],
    *,
    prog: str,
    description: str,
    by: str | None = None,
    epilog: str = EPILOG,
    flags: Mapping[str, str] | None = None,
) -> int:
    """Parse the command line of a launcher, check it and return the exit status of `act`.

    A ConfigError is printed and gives status 2. `flags` are added to `--dry-run`, which shows the plan of the launcher
    `by`, or is left to `act` if `by` is None.
    """
    parser = Parser(prog=f"python3 -m {prog}", description=description, epilog=epilog)
    parser.add_argument("entry", help="script with the training loop, e.g. examples/arealite/gsm8k_grpo.py")
    parser.add_argument("--config", metavar="FILE.yaml", required=True, help="config of the experiment")
    parser.add_argument("--dry-run", action="store_true", help="print what would run where, and start nothing")
    for flag, text in (flags or {}).items():
        parser.add_argument(flag, action="store_true", help=text)
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="keys of the experiment to change")
    args, unknown = parser.parse_known_intermixed_args(argv)
    try:
        require_linux()
        script, words = entry_script(args.entry), ["--config", args.config, *unknown, *args.overrides]
        config = load_run_config(words, script)
        plan = checked_plan(config)
        run = Run(config, plan, script, words)
        if plan.takes_turns and prog != "arealite.launcher.local":
            raise ConfigError(
                f"servers on the trainer's devices must be started by arealite.launcher.local: got {prog}, whose jobs "
                f"have devices of their own, and {config.allocation}. Use that one, or write '+' in allocation_mode."
            )
        if args.dry_run:
            preflight(run, is_dry_run=True)
        if args.dry_run and by is not None:
            print("\n".join(plan_lines(run, by=by)))
            return 0
        return act(run, args)
    except ConfigError as error:
        show_refusal(error)
        return REFUSED
    except KeyboardInterrupt:  # before the run installs its own handlers
        return 128 + signal.SIGINT


def preflight(run: Run, *, is_dry_run: bool = False, is_here: bool = False) -> None:
    """Raise ConfigError if the cheap half of `arealite check` reports a problem.

    It has a process of its own, so that a launcher stays light; one that does not end does not hold up the run. A dry
    run checks the script's declaration alone, and shows it if it is a graph. Memory is checked for a run on this node
    (`is_here`).
    """
    if not (run.config.launcher.preflight and run.plan.trainers):
        return
    if is_dry_run and declared_check(run.entry) is None:
        return
    topics, hidden = "model, data and reward", {}  # the check hides GPUs itself
    program = ["arealite.cli.check", "here" if is_here else "elsewhere"]
    if is_dry_run:
        topics, program = "what the script declares", ["arealite.cli.check", "declared"]
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
    print(f"checking {topics} (launcher.preflight=false skips it)", file=sys.stderr, flush=True)
    output = None if is_dry_run else 2  # a declaration is shown with the plan
    python = [sys.executable, "-P", "-m"]
    command = [*python, "arealite.launcher.place.guard", *python, *program, str(run.entry), *run.argv]
    env = os.environ | environment(run.config.launcher.trainer_env_vars) | hidden
    timeout_s = setup_timeout_s(run.config)
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=output) as check:  # which closes the stdin
        try:
            status = exit_status(check.wait(timeout_s))
            end = f"ended with {describe_exit(status)}"
        except subprocess.TimeoutExpired:
            status, end = -1, f"took longer than {timeout_s:g} s"
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if status == _PROBLEMS:
        raise ConfigError("the problems above must be solved: nothing was started.")
    if status != 0:
        consequence = "nothing was checked" if is_dry_run else "the run starts without it"
        print(f"the check {end}: {consequence}", file=sys.stderr, flush=True)


def launch(
    run: Run,
    place: Place,
    *,
    restart: str | None = None,
    is_checked: bool = False,
    lock_timeout_s: float = _LOCK_TIMEOUT_S,
) -> int:
    """Start a run, wait for its end and return the launcher's exit status. Raises ConfigError before anything starts.

    `restart` is the reason of a restart, and `is_checked` says that `preflight` has run. Must be called from the main
    thread, which takes SIGINT and SIGTERM meanwhile: a caller that gets 128 or more should end as well. The caller must
    not start other child processes meanwhile.
    """
    place.check(run.config, run.plan)
    # The trainer checks that it is complete.
    if run.config.recover.mode == "resume" and run.folder.newest_checkpoint < 0:
        raise ConfigError(
            f"{run.folder.recover} must hold a checkpoint for recover.mode=resume: got none. Set recover.mode=auto to "
            "start afresh."
        )
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(run.folder.launcher_lock, timeout_s=lock_timeout_s))
            if restart is None and _is_done(run):
                print(
                    f"this run has finished: {run.folder.report}. trial_name=... starts another one, more "
                    "total_train_steps or total_train_epochs continue it."
                )
                return 0
            if not is_checked:
                preflight(run, is_here=place.is_here)
            secret = _prepare_folder(run, is_restart=restart is not None)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from error
        return asyncio.run(_run(run, place, secret, restart))


def _is_done(run: Run) -> bool:
    """Return whether a run that would resume has nothing left to do."""
    with reading(run.folder.summary):
        if run.config.recover.mode not in ("auto", "resume") or not run.folder.is_finished:
            return False
    with reading(run.folder.config, yaml.YAMLError):
        then = require_object(yaml.safe_load(run.folder.config.read_text(encoding="utf-8")))
    now = yaml.safe_load(to_yaml(run.config))
    return all(then.get(key) == now[key] for key in ("total_train_epochs", "total_train_steps", "train_dataset"))


def _prepare_folder(run: Run, *, is_restart: bool) -> str:
    """Write the files that the run needs at its start, and return its secret. Raises OSError and ValueError."""
    folder = run.folder
    resumes = run.config.recover.mode in ("auto", "resume") and folder.newest_checkpoint >= 0
    if trains(run.config) and not is_restart and not resumes:
        with file_lock(folder.trainer_lock, timeout_s=_LOCK_TIMEOUT_S):  # a trainer may have been started by hand
            empty_folder(folder.path, keep=OF_TRIAL)
    with writing(folder.logs):
        folder.logs.mkdir(parents=True, exist_ok=True)
    if not is_restart:
        shutil.rmtree(folder.logs / "trace", ignore_errors=True)
    argv = [re.sub(r"(_env_vars=).*", r"\1***", word, flags=re.DOTALL) for word in run.argv]
    record = {"entry": str(run.entry), "argv": argv, "started_in": os.getcwd()}
    write_atomically(folder.command, json.dumps(record) + "\n", mode=0o600)  # `arealite replay` reads it
    return ensure_secret(folder.path)


async def _run(run: Run, place: Place, secret: str, restart: str | None) -> int:
    """Run to the end, with as many restarts in a row without a new checkpoint as `recover` allows."""
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
            supervisor = Supervisor(run, place, registry, secret)
            end = await supervisor.supervise(restart, pause_s(num_restarts))
            if folder.newest_checkpoint > progress:
                num_restarts, progress = 0, folder.newest_checkpoint
            # A program that failed by itself at the start, not by a signal or with its node, would fail again.
            is_hopeless = end.status == REFUSED or (end.status == 1 and not folder.has_begun)
            if not end.is_failure or is_hopeless or num_restarts == retries:
                return end.status
            num_restarts += 1
            restart = f"restart {num_restarts} of {retries}, because {end.reason}"
            do_nodes_answer = await asyncio.to_thread(place.nodes_answer)
            if supervisor.signalled is not None:
                return supervisor.signalled.status
            if not do_nodes_answer:
                return NODE_LOST
    finally:
        await registry.close()
