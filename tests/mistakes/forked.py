"""The launcher's check alone, in a fork of a process that has imported it: 1 instead of 6 CPU seconds."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import testing_forks

from arealite.cli.check.check import check

_BEFORE = "checking model, data and reward (launcher.preflight=false skips it)\n"
_AFTER = "ConfigError: the problems above must be solved: nothing was started.\n"

testing_forks.preload(__name__)


def fork_check(words: list[str], folder: Path, timeout_s: float) -> tuple[int, str]:
    """Return exit status and output of a launcher with these arguments, as mistakes that are not forked show them."""
    shown = folder.with_name(f"{folder.name}.shown")
    process = testing_forks.start(checked, words, folder, shown, COLUMNS="160", CUDA_VISIBLE_DEVICES="")
    status = testing_forks.status_of(process, timeout_s)
    process.kill()
    return {1: 2}.get(status or 0, -1), f"{_BEFORE}{shown.read_text(errors='replace')}{_AFTER}"


def checked(words: list[str], folder: Path, shown: Path) -> int:
    """Check a run in a folder; all output goes to the file `shown`."""
    with shown.open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    os.chdir(folder)
    logging.disable(logging.WARNING)
    return check(words[0], words[1:], preflight=True)
