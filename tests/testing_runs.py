"""Whole runs as users start them, on a node without GPUs, from a folder that is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from harness.processes import environment
from testing_metrics import undocumented

from arealite.utils.files import read_jsonl


def run(*words: object, cwd: str | Path = "/", status: int = 0, **env: str) -> str:
    """Run Python with these arguments until it ends with `status`, and return what it printed."""
    command, env = [sys.executable, *map(str, words)], environment() | {"CUDA_VISIBLE_DEVICES": ""} | env
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout + done.stderr


def arealite(*words: object, **options: Any) -> str:
    """Run a command of the package."""
    return run("-m", "arealite.cli.main", *words, **options)


def launch(script: str | Path, config: str | Path, *words: object, **options: Any) -> str:
    """Run a script with its config by the launcher."""
    return run("-m", "arealite.launcher.local", script, "--config", config, *words, **options)


def typed(commands: str, folder: Path, programs: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Type commands in a folder as on a laptop; `programs` is a folder for `python3` and `arealite`."""
    programs.mkdir(exist_ok=True)
    for name, arguments in (("python3", ""), ("arealite", "-m arealite.cli.main")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    env = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""} | env
    done = subprocess.run(["sh", "-ec", commands], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{commands}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
    return done


def metrics(run_folder: Path, own: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of a run, whose keys docs/metrics.md must have, except the user's `own`."""
    rows = read_jsonl(run_folder / "metrics.jsonl")
    assert undocumented({key for row in rows for key in row}) == set(own), "keys that docs/metrics.md lacks"
    return rows
