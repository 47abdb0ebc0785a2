"""Runs agents: a coroutine in an event loop of its own, a plain function in a process, or a command.

Agents never share a loop with the proxy or the episodes: an agent that blocks would wait for itself. When a run is
cancelled, its process is killed with everything that it has started.
"""

import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
from abc import ABC, abstractmethod
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from arealite.agent.called import Called
from arealite.agent.session import new_key
from arealite.api.errors import AgentError, ConfigError
from arealite.api.script import SourceLine, users_line
from arealite.rollout.event_loop import EventLoopThread
from arealite.utils.background import in_thread
from arealite.utils.processes import describe_exit, exit_status, kill_group, wait_gone
from arealite.utils.secret import environment_without_secret
from arealite.utils.worker_process import CallError, WorkerCrashError, WorkerPool, pickle_target

_MAX_GROWTH_GIB = 4.0
_LONGEST_S = 20 * 24 * 3600.0  # of a command; the episode's deadline comes first
_MAX_OUTPUT_BYTES = 1 << 20  # of a command: its last line is its reward
_SHOWN_CHARACTERS = 2000
_CLOSE_S = 5.0


@dataclass(frozen=True)
class Endpoint:
    """The address of the model for one run of an agent, with its keys."""

    address: str
    api_key: str
    untrained_key: str
    """For requests that are not trained on, e.g. of a judge or a simulated user."""

    @property
    def base_url(self) -> str:
        return f"{self.address}/v1"

    def environment(self) -> dict[str, str]:
        """Return the variables that the packages of OpenAI and Anthropic read."""
        no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1"]))
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.address,
            "ANTHROPIC_API_KEY": self.api_key,
            "AREALITE_UNTRAINED_KEY": self.untrained_key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "NO_PROXY": no_proxy,
            "no_proxy": no_proxy,
        }


class Agent(ABC):
    """Runs one agent any number of times."""

    @abstractmethod
    async def run(self, data: dict[str, Any], endpoint: Endpoint) -> Any:
        """Run the agent once; return its reward."""

    @contextlib.asynccontextmanager
    async def key(self) -> AsyncIterator[str]:
        """Yield the key of one run, as soon as it may begin."""
        yield new_key()

    def close(self) -> None:  # noqa: B027
        """End all runs, and the processes and threads of the agent."""


def agent_of(run: Agent | Callable[..., Any] | str | Sequence[str], *, num_processes: int) -> Agent:
    """Return the agent for a coroutine, a plain function or a command. Raises ConfigError or ValueError."""
    if isinstance(run, Agent):
        return run
    if isinstance(run, str | Sequence):
        return CommandAgent([*run] if not isinstance(run, str) else ["/bin/sh", "-c", run], num_processes)
    called = getattr(run, "__call__", None)  # noqa: B004
    if inspect.iscoroutinefunction(run) or inspect.iscoroutinefunction(called):
        return CoroutineAgent(run)
    return ProcessAgent(run, num_processes)


class CoroutineAgent(Agent):
    """An `async def`, in an event loop that all runs share, with one pool of connections."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._names = _wanted(function, {"data", *_NAMES, "http_client"})
        self._loop: EventLoopThread | None = None
        self._client: Any = None

    async def run(self, data: dict[str, Any], endpoint: Endpoint) -> Any:
        if self._loop is None:
            self._loop = EventLoopThread("arealite-agents", what="loop of agents")
        return await asyncio.wrap_future(self._loop.submit(self._run(data, endpoint)))

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close(_CLOSE_S)

    async def _run(self, data: dict[str, Any], endpoint: Endpoint) -> Any:
        call = {"data": data} | _fields(endpoint)
        if "http_client" in self._names:
            call["http_client"] = self._http_client()
        try:
            return await self._function(**{name: call[name] for name in self._names})
        except SystemExit as error:  # it would end the loop of all agents
            raise AgentError(
                f"an agent must return its reward: got sys.exit({error.code!r}). Raise an error."
            ) from error

    def _http_client(self) -> Any:
        """Return one client for all runs: making one takes 30 ms of CPU."""
        if self._client is None:
            name = next((name for name in ("httpx2", "httpx") if importlib.util.find_spec(name)), None)
            if name is None:
                raise ConfigError("an agent with http_client must have httpx2 or httpx: got neither. Install one.")
            httpx = importlib.import_module(name)
            # The pool looks at all its connections for each request, so that idle ones are closed soon.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
            self._client = httpx.AsyncClient(limits=limits, timeout=600.0, trust_env=False)
            assert self._loop is not None
            self._loop.closers.append(self._client.aclose)
        return self._client


class ProcessAgent(Agent):
    """A plain function, in processes that are reused."""

    def __init__(self, function: Callable[..., Any], num_processes: int) -> None:
        self._name = getattr(function, "__qualname__", type(function).__qualname__)
        self._names = _wanted(function, {"data", *_NAMES})
        target = pickle_target(function, self._name, what="an agent", wrapper=Called)
        self._pool = WorkerPool(target, name="agent", max_growth_gib=_MAX_GROWTH_GIB)
        self._slots = asyncio.Semaphore(num_processes)

    async def run(self, data: dict[str, Any], endpoint: Endpoint) -> Any:
        call = {"data": data} | _fields(endpoint)
        arguments = endpoint.environment(), {name: call[name] for name in self._names}
        async with self._slots:
            worker = self._pool.take()
            try:
                return await worker.acall(arguments)
            except WorkerCrashError as error:
                raise AgentError(f"agent {self._name} must run in a healthy process: got {error}.") from error
            except CallError as error:
                failure = AgentError(f"agent {self._name} must not raise: got {error.summary}\n{error.text}")
                place = users_line(SourceLine(*frame) for frame in error.frames)
                failure.add_note(f"It was raised at {place}")
                raise failure from None
            finally:
                self._pool.give_back(worker)

    def close(self) -> None:
        self._pool.close()


class CommandAgent(Agent):
    """A command: the row comes on stdin as JSON, the reward is the last line that it prints, as JSON."""

    def __init__(self, command: Sequence[str], num_processes: int) -> None:
        self._command = list(command)
        self._slots = asyncio.Semaphore(num_processes)

    async def run(self, data: dict[str, Any], endpoint: Endpoint) -> Any:
        env = environment_without_secret() | endpoint.environment()
        async with self._slots:
            start = asyncio.create_subprocess_exec(
                *self._command, env=env, process_group=0, stdin=PIPE, stdout=PIPE, stderr=PIPE
            )
            starting = asyncio.ensure_future(start)  # asyncio forgets the children of one whose start is cancelled
            try:
                process = await asyncio.shield(starting)
                output, errors = await _talk(process, json.dumps(data, default=_plain).encode() + b"\n")
            finally:
                await asyncio.shield(_end(starting))
        name = " ".join(self._command)[:100]
        if process.returncode:
            end = describe_exit(exit_status(process.returncode))
            raise AgentError(f"the command {name} must end with exit status 0: got {end}.\n{errors}")
        lines = output.strip().splitlines() or [""]
        try:
            return json.loads(lines[-1])
        except ValueError:
            raise AgentError(
                f"the command {name} must print its reward as its last line: got {lines[-1]!r:.100}. Print a number, "
                "null to reject, or an object of rewards by the id of a response."
            ) from None


async def _talk(process: asyncio.subprocess.Process, row: bytes) -> tuple[str, str]:
    """Write the row, wait for the end of the command, and return the last part of its stdout and stderr."""
    stdin = process.stdin
    assert stdin is not None and process.stdout is not None and process.stderr is not None

    async def write() -> None:
        with contextlib.suppress(ConnectionError):  # the command need not read its input
            stdin.write(row)
            await stdin.drain()
        stdin.close()

    async def tail(stream: asyncio.StreamReader, limit: int) -> str:
        end = b""
        while piece := await stream.read(1 << 16):
            end = (end + piece)[-limit:]
        return end.decode(errors="replace")

    talk = asyncio.gather(write(), tail(process.stdout, _MAX_OUTPUT_BYTES), tail(process.stderr, _SHOWN_CHARACTERS))
    talk.add_done_callback(lambda done: done.cancelled() or done.exception())  # a cancelled run does not wait for it
    try:
        await in_thread(wait_gone, [process.pid], _LONGEST_S)  # `process.wait` waits for the ends of its pipes as well
        await in_thread(kill_group, process.pid, False)  # processes left in its group would hold them open
        async with asyncio.timeout(_CLOSE_S):
            _, output, errors = await talk
            await process.wait()
    except TimeoutError:
        raise AgentError(
            "a command must leave no process that has its output: got a process in a group of its own. Redirect the "
            "output of that process, or end it."
        ) from None
    finally:
        talk.cancel()
    return output, errors


async def _end(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    """End a command, and processes that it has left in its process group."""
    process = await starting
    await in_thread(kill_group, process.pid, process.returncode is None)
    process._transport.close()  # type: ignore[attr-defined]  # another process may hold the other ends of its pipes


_NAMES = ("base_url", "api_key", "untrained_key")


def _fields(endpoint: Endpoint) -> dict[str, str]:
    return {name: getattr(endpoint, name) for name in _NAMES}


def _wanted(function: Callable[..., Any], known: set[str]) -> list[str]:
    """Return the `known` arguments that an agent takes. Raises ConfigError if it needs other arguments."""
    parameters = inspect.signature(function).parameters.values()
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = {each.name for each in parameters if each.default is each.empty and each.kind not in variable}
    if unknown := sorted(needed - known):
        names = ", ".join(sorted(known))
        raise ConfigError(f"an agent must take arguments of {names}: got {', '.join(unknown)}. Give it defaults.")
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return sorted(known)
    return [each.name for each in parameters if each.name in known]


def _plain(value: Any) -> Any:
    """Convert a value of a row that JSON does not have."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
