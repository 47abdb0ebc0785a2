"""Environments of verifiers as agents: a row names its environment and task, the environment asks the model for turns
by the proxy, and its rubric's reward ends the run.

An environment keeps a client for each key that it has seen, so that runs take their keys in turn from a fixed number.
"""

import asyncio
import contextlib
import itertools
import json
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

from arealite.agent.launch import Agent, Endpoint
from arealite.agent.session import new_key
from arealite.agent.workflow import AgentWorkflow
from arealite.api.cli_args import AgentConfig, GenerationHyperparameters
from arealite.api.errors import AgentError
from arealite.dataset.verifiers import START_S, command_of
from arealite.rollout.event_loop import EventLoopThread
from arealite.utils.background import in_thread
from arealite.utils.processes import describe_exit, exit_status, kill_group

_CANCEL_S = 30.0  # for a cancelled episode to end; then the process is killed
_END_S = 60.0  # for a key that a cancelled episode has
_CLOSE_S = 10.0
_LINE_BYTES = 2**28


class VerifiersWorkflow(AgentWorkflow):
    """Runs `gconfig.n_samples` episodes of an environment of verifiers for each task: rows of `verifiers:ENV`."""

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        config: AgentConfig | None = None,
        num_runs: int = 256,
    ) -> None:
        """`num_runs` bounds the episodes that run at once."""
        super().__init__(VerifiersAgent(num_runs), gconfig, tokenizer, config=config)


class VerifiersAgent(Agent):
    """Runs at most `num_runs` episodes of all environments at once."""

    def __init__(self, num_runs: int) -> None:
        self._keys: asyncio.Queue[str] = asyncio.Queue()  # that no run has
        for _ in range(num_runs):
            self._keys.put_nowait(new_key())
        self._ends: dict[str, Future[None]] = {}  # of the runs of keys
        self._environments: dict[str, _Environment] = {}
        self._loop: EventLoopThread | None = None  # of the processes, which outlives that of the episodes

    @contextlib.asynccontextmanager
    async def key(self) -> AsyncIterator[str]:
        key = await self._keys.get()
        try:
            yield key
        finally:
            await asyncio.shield(self._give_back(key))

    async def _give_back(self, key: str) -> None:
        """Free a key once the episode that had it asks for nothing any more, also if it was cancelled."""
        if (ended := self._ends.pop(key, None)) is not None:
            await asyncio.wait({asyncio.wrap_future(ended)}, timeout=_END_S)
        self._keys.put_nowait(key)

    async def run(self, data: dict[str, Any], endpoint: Endpoint) -> float:
        if self._loop is None:
            self._loop = EventLoopThread("arealite-environments", what="loop of environments")
        if (environment := self._environments.get(path := data["environment"])) is None:
            environment = self._environments[path] = _Environment(path)
            self._loop.closers.append(environment.close)
        ended = self._ends[endpoint.api_key] = Future()

        async def run() -> float:
            try:
                return await environment.run(data["task"], endpoint)
            finally:
                ended.set_result(None)

        return await asyncio.wrap_future(self._loop.submit(run()))

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close(_CLOSE_S)


class _Environment:
    """The process of an environment, started with the first episode, and anew when it has ended."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._told_tasks = asyncio.Event()
        self._runs: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()

    async def run(self, task: int, endpoint: Endpoint) -> float:
        """Run an episode and return its reward. Raises AgentError."""
        async with self._starting:
            if self._process is None:
                await self._start()
        number, ended = next(self._numbers), asyncio.get_running_loop().create_future()
        self._runs[number] = ended
        self._send({"run": number, "task": task, "base_url": endpoint.base_url, "key": endpoint.api_key})
        try:
            result = await ended
        except asyncio.CancelledError:
            if ended.cancelled():  # by this very cancellation: it has not ended
                await self._cancel(number)
            raise
        finally:
            del self._runs[number]
        if result["error"]:
            raise AgentError(f"an episode of {self.path} must end well: got {result['error']}.")
        return float(result["reward"])

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
        """Start the process and wait until it has read its tasks. Raises AgentError."""
        self._told_tasks.clear()
        command, env = command_of(self.path)
        self._process = process = await asyncio.create_subprocess_exec(
            *command, env=env, process_group=0, stdin=PIPE, stdout=PIPE, limit=_LINE_BYTES
        )
        self._reader = asyncio.create_task(self._read(process))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._told_tasks.wait()
                if self._process is not None:
                    return
        kill_group(process.pid, True)
        raise AgentError(f"{self.path} must read its tasks within {START_S:g} s: it did not. See the log above.")

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
                ended.set_exception(AgentError(f"the process of {self.path} must live: got {end}. See the log above."))
