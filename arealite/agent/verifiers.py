"""Environments of verifiers as agents: a row names its environment and task, the environment asks the model for turns
by the proxy, and its rubric's reward ends the run.

An environment keeps a client for each key that it has seen, so that runs take their keys in turn from a fixed number.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
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


class VerifiersAgent(Agent):
    """Runs at most `num_runs` episodes of all environments at once."""

    def __init__(self, num_runs: int) -> None:
        self._free = [(new_key(), slot) for slot in range(num_runs)]
        self._slots = dict(self._free)
        self._places = asyncio.Semaphore(num_runs)
        self._environments: dict[str, VerifiersProcess] = {}
        self._loop: EventLoopThread | None = None  # of the processes, which outlives that of the episodes

    @contextlib.asynccontextmanager
    async def key(self) -> AsyncIterator[str]:
        async with self._places:
            place = self._free.pop()
            try:
                yield place[0]
            finally:
                self._free.append(place)

    async def run(self, data: dict[str, Any], endpoint: Endpoint) -> float:
        if self._loop is None:
            self._loop = EventLoopThread("arealite-environments", what="loop of environments")
        return await asyncio.wrap_future(self._loop.submit(self._run(data["environment"], data["task"], endpoint)))

    async def _run(self, path: str, task: int, endpoint: Endpoint) -> float:
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
