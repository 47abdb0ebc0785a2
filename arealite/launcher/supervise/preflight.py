"""Looks at model, tokenizer, data and reward before anything starts, in a process of its own: launchers stay light."""

import os
import signal
import subprocess
import sys

from arealite.api.errors import ConfigError
from arealite.launcher.plan.jobs import environment
from arealite.launcher.plan.plan import Run, setup_timeout_s
from arealite.utils.processes import describe_exit, die_with_parent, exit_status, kill_tree

_PROBLEMS = 1  # exit status of the check


def preflight(run: Run) -> None:
    """Raise ConfigError if the cheap half of `arealite check` finds a problem, which it has printed.

    A check that does not come to its end is no problem of the run: it may start.
    """
    if not (run.config.launcher.preflight and run.plan.trainers):
        return
    print("checking model, data and reward (launcher.preflight=false skips it)", file=sys.stderr, flush=True)
    command, ours = [sys.executable, "-P", "-m", "arealite.cli.check", str(run.entry), *run.argv], os.getpid()
    env = os.environ | environment(run.config.launcher.trainer_env_vars) | {"CUDA_VISIBLE_DEVICES": ""}
    check = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=lambda: die_with_parent(ours)
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
        print(f"the check {end}: the run starts without it", file=sys.stderr, flush=True)
