"""Environments of verifiers as agents: a row names its environment and task, the environment asks the model for turns
by the proxy, and its rubric's reward ends the run.

An environment keeps a client for each key that it has seen, so that runs take their keys in turn from a fixed number.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

from arealite.agent.launch import Agent, Endpoint
from arealite.agent.session import new_key
from arealite.agent.workflow import AgentWorkflow
from arealite.api.cli_args import AgentConfig, GenerationHyperparameters
from arealite.api.errors import AgentError
from arealite.rollout.event_loop import EventLoopThread
from arealite.utils.verifiers_env import VerifiersProcess
from arealite.utils.worker_process import CallError, WorkerCrashError

_CLOSE_S = 10.0
_END_S = 60.0  # for a cancelled episode to end


class VerifiersAgent(Agent):
    """Runs at most `num_runs` episodes of all environments at once."""

    def __init__(self, num_runs: int) -> None:
        self._free = [(new_key(), slot) for slot in range(num_runs)]
        self._slots = dict(self._free)
        self._places = asyncio.Semaphore(num_runs)
        self._ends: dict[str, Future[None]] = {}  # of the runs of keys
        self._environments: dict[str, VerifiersProcess] = {}
        self._loop: EventLoopThread | None = None  # of the processes, which outlives that of the episodes

    @contextlib.asynccontextmanager
    async def key(self) -> AsyncIterator[str]:
        await self._places.acquire()
        place = self._free.pop()
        try:
            yield place[0]
        finally:
            await asyncio.shield(self._give_back(place))

    async def _give_back(self, place: tuple[str, int]) -> None:
        """Free a key once the episode that had it asks for nothing any more, also if it was cancelled."""
        if (ended := self._ends.pop(place[0], None)) is not None:
            await asyncio.wait({asyncio.wrap_future(ended)}, timeout=_END_S)
        self._free.append(place)
        self._places.release()

    async def run(self, data: dict[str, Any], endpoint: Endpoint) -> float:
        if self._loop is None:
            self._loop = EventLoopThread("arealite-environments", what="loop of environments")
        ended = self._ends[endpoint.api_key] = Future()
        running = self._loop.submit(self._run(data["environment"], data["task"], endpoint, ended))
        return await asyncio.wrap_future(running)

    async def _run(self, path: str, task: int, endpoint: Endpoint, ended: Future[None]) -> float:
        key = endpoint.api_key
        if (environment := self._environments.get(path)) is None:
            assert self._loop is not None
            environment = self._environments[path] = VerifiersProcess(path)
            self._loop.closers.append(environment.close)
        try:
            result = await environment.run(task, base_url=endpoint.base_url, key=key, slot=self._slots[key])
        except WorkerCrashError as error:
            raise AgentError(f"the process of {path} must live: got {error}.") from error
        except CallError as error:
            raise AgentError(f"an episode of {path} must end well: got {error.text}.") from error
        finally:
            ended.set_result(None)
        return float(result["reward"])

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close(_CLOSE_S)


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
