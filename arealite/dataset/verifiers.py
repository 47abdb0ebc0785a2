"""Tasks of an environment of verifiers as rows, and the command that runs its episodes.

An environment is named `verifiers:ENV?option=value`: ENV is an installed module, or the path of one, `python=FILE` the
interpreter that has it, `tasks=N` the most tasks to read. Other options are keys of verifiers' own config of an
environment, e.g. `taskset.split=train` or `agent.harness.id=bash`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import yaml

from arealite.api.config.data import VERIFIERS
from arealite.dataset.rows import Row
from arealite.utils.secret import environment_without_secret

START_S = 300.0  # for an environment to be imported and its tasks to be read
_PROGRAM = Path(__file__).with_name("verifiers_program.py")
_NUM_TASKS = 10_000


def verifiers_rows(path: str) -> list[Row]:
    """Return a row for each task. Raises ValueError for an environment that can't be loaded."""
    command, variables = command_of(path)
    try:
        done = subprocess.run(
            command, input="", capture_output=True, text=True, timeout=START_S, env=variables, check=False
        )
        tasks = json.loads(done.stdout.partition("\n")[0])
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        last = done.stderr.strip().rpartition("\n")[2] if isinstance(error, ValueError) else str(error)
        raise ValueError(
            f"{path} must be an environment of verifiers 0.4: got {last}. Install it, or name the interpreter that "
            f"has it: {VERIFIERS}ENV?python=/path/to/venv/bin/python."
        ) from error
    return [{"question": text, "answer": "", "environment": path, "task": index} for index, text in enumerate(tasks)]


def command_of(path: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs an environment, and the variables of its process: programs of its interpreter, such
    as uv, are found first, and servers of tools find the module, too."""
    name, _, query = path.removeprefix(VERIFIERS).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    python = str(Path(options.pop("python", sys.executable)).expanduser())
    number, is_file = options.pop("tasks", str(_NUM_TASKS)), "/" in name or name.endswith(".py")
    folder = str(Path(name).expanduser().resolve().parent if is_file else Path.cwd())
    config: dict[str, Any] = {}
    for key, text in {"taskset.id": Path(name).stem if is_file else name, **options}.items():
        *blocks, leaf = key.split(".")
        place = config
        for block in blocks:
            place = place.setdefault(block, {})
        place[leaf] = yaml.safe_load(text)
    programs = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    variables = environment_without_secret() | {"PATH": programs, "PYTHONPATH": folder}
    return [python, str(_PROGRAM), json.dumps(config), folder, number], variables
