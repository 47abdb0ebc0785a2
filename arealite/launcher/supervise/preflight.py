"""Checks a script's declaration, model, tokenizer, data and reward, in its own process: launchers stay light."""

import os
import signal
import subprocess
import sys

from arealite.api.config.run import declared_check
from arealite.api.errors import ConfigError
from arealite.launcher.plan.jobs import environment
from arealite.launcher.plan.plan import Run, setup_timeout_s
from arealite.utils.processes import describe_exit, die_with_parent, exit_status, kill_tree

_PROBLEMS = 1  # exit status of the check


def preflight(run: Run, *, is_dry_run: bool = False, is_here: bool = False) -> None:
    """Raise ConfigError if the cheap half of `arealite check` reports a problem.

    A check that does not end does not hold up the run. A dry run checks the script's declaration alone, and shows it if
    it is a graph. Memory is checked for a run on this node (`is_here`).
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
    command, ours = [sys.executable, "-P", "-m", *program, str(run.entry), *run.argv], os.getpid()
    env = os.environ | environment(run.config.launcher.trainer_env_vars) | hidden
    check = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=output, preexec_fn=lambda: die_with_parent(ours)
    )
    try:
        status = exit_status(check.wait(setup_timeout_s(run.config)))
        end = f"ended with {describe_exit(status)}"
    except subprocess.TimeoutExpired:
        status, end = -1, f"took longer than {setup_timeout_s(run.config):g} s"
    finally:
        if check.poll() is None:
            kill_tree(check.pid)
            check.wait()
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if status == _PROBLEMS:
        raise ConfigError("the problems above must be solved: nothing was started.")
    if status != 0:
        consequence = "nothing was checked" if is_dry_run else "the run starts without it"
        print(f"the check {end}: {consequence}", file=sys.stderr, flush=True)
