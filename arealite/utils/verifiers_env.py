"""The side of ours of `verifiers_program.py`: a process that runs the episodes of one environment.

An environment is named `verifiers:ENV?option=value`: ENV is an installed module, or the path of one, `python=FILE` the
interpreter that has it, `tasks=N` the most tasks to read. Other options are keys of verifiers' own config of an
environment, e.g. `taskset.split=train` or `agent.harness.id=bash`.
"""

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import yaml

from arealite.utils.background import in_thread
from arealite.utils.processes import describe_exit, exit_status, kill_group
from arealite.utils.secret import environment_without_secret
from arealite.utils.worker_process import CallError, WorkerCrashError

SCHEME = "verifiers:"
_PROGRAM = Path(__file__).with_name("verifiers_program.py")
_NUM_TASKS = 10_000
_START_S = 300.0  # for the environment to be imported and its tasks to be read
_CANCEL_S = 30.0  # for a cancelled episode to end; then the process is killed
_LINE_BYTES = 2**28


def command_of(path: str) -> list[str]:
    """Return the command that runs an environment."""
    name, _, query = path.removeprefix(SCHEME).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    python, number = options.pop("python", sys.executable), options.pop("tasks", str(_NUM_TASKS))
    is_file = "/" in name or name.endswith(".py")
    config: dict[str, Any] = {}
    for key, text in {"taskset.id": Path(name).stem if is_file else name, **options}.items():
        *blocks, leaf = key.split(".")
        place = config
        for block in blocks:
            place = place.setdefault(block, {})
        place[leaf] = yaml.safe_load(text)
    folder = Path(name).expanduser().resolve().parent if is_file else Path.cwd()
    return [str(Path(python).expanduser()), str(_PROGRAM), json.dumps(config), str(folder), number]


def tasks_of(path: str) -> list[str]:
    """Return the prompts of the tasks of an environment. Raises ValueError if it can't be loaded."""
    try:
        done = subprocess.run(
            command_of(path),
            input="",
            capture_output=True,
            text=True,
            timeout=_START_S,
            env=_environment(path),
            check=False,
        )
        tasks: list[str] = json.loads(done.stdout.partition("\n")[0])
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        last = done.stderr.strip().rpartition("\n")[2] if isinstance(error, ValueError) else str(error)
        raise ValueError(
            f"{path} must be an environment of verifiers 0.4: got {last}. Install it, or name the interpreter that "
            f"has it: {SCHEME}ENV?python=/path/to/venv/bin/python."
        ) from error
    return tasks


def _environment(path: str) -> dict[str, str]:
    """Return the variables of the process: programs of its interpreter, such as uv, are found first, and the module
    of the environment is found by servers of tools, too."""
    python, _, _, folder, _ = command_of(path)
    programs = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return environment_without_secret() | {"PATH": programs, "PYTHONPATH": folder}


class VerifiersProcess:
    """The process of an environment, started with the first episode, and anew when it has ended."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._told_tasks = asyncio.Event()
        self._runs: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()

    async def run(self, task: int, *, base_url: str, key: str, slot: int) -> dict[str, Any]:
        """Run an episode; return its reward and whether it was truncated. Raises CallError or WorkerCrashError."""
        async with self._starting:
            if self._process is None:
                await self._start()
        number, ended = next(self._numbers), asyncio.get_running_loop().create_future()
        self._runs[number] = ended
        self._send({"run": number, "task": task, "base_url": base_url, "key": key, "slot": slot})
        try:
            result: dict[str, Any] = await ended
        except asyncio.CancelledError:
            if ended.cancelled():  # by this very cancellation: it has not ended
                await self._cancel(number)
            raise
        finally:
            del self._runs[number]
        if result["error"]:
            raise CallError(result["error"], [])
        return result

    async def _cancel(self, number: int) -> None:
        """Cancel an episode and wait until it asks for nothing any more."""
        ended = self._runs[number] = asyncio.get_running_loop().create_future()
        self._send({"cancel": number})
        await asyncio.wait({ended}, timeout=_CANCEL_S)
        if not ended.done() and self._process is not None:
            kill_group(self._process.pid, True)

    async def close(self) -> None:
        """Kill the process, with all that it has started, and wait until it is gone."""
        if self._process is not None:
            kill_group(self._process.pid, True)
            await self._process.wait()

    async def _start(self) -> None:
        """Start the process and wait until it has read its tasks. Raises WorkerCrashError."""
        self._told_tasks.clear()
        command, env = command_of(self.path), _environment(self.path)
        self._process = process = await asyncio.create_subprocess_exec(
            *command, env=env, process_group=0, stdin=PIPE, stdout=PIPE, limit=_LINE_BYTES
        )
        self._reader = asyncio.create_task(self._read(process))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_S):
                await self._told_tasks.wait()
                if self._process is not None:
                    return
        kill_group(process.pid, True)
        raise WorkerCrashError(f"no tasks before its end or within {_START_S:g} s, see the log above")

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand out the ends of episodes; all that run fail when the process ends."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            answer = json.loads(line)
            if isinstance(answer, list):
                self._told_tasks.set()
            elif (ended := self._runs.get(answer["run"])) is not None and not ended.done():
                ended.set_result(answer)
        self._process = None
        self._told_tasks.set()
        await in_thread(kill_group, process.pid, process.returncode is None)
        end = describe_exit(exit_status(await process.wait()))
        for ended in self._runs.values():
            if not ended.done():
                ended.set_exception(WorkerCrashError(f"{end}, see the log above"))
