"""A rollout worker: a Ray actor that runs episode attempts for its master."""

from __future__ import annotations

import asyncio
import copy
import os
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.io_struct import PromptId
from arealite.api.script import users_code
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.batch import Piece, pack
from arealite.core.worker import portable, write_output_to
from arealite.inference.remote_engine import ClientView, RemoteInferenceEngine
from arealite.rollout.account.store import table_of
from arealite.rollout.episode import Episode, LocalAttempts
from arealite.rollout.executor import RolloutExecutor
from arealite.rollout.prompts import Prompt, Row, SampleRecord, ShouldAccept
from arealite.utils import heartbeat
from arealite.utils.processes import raise_file_limit


@dataclass(frozen=True)
class RolloutSpec:
    """Settings of rollout workers."""

    num: int
    config: InferenceEngineConfig
    make_workflow: Callable[[], RolloutWorkflow]
    should_accept: ShouldAccept | None
    env: Mapping[str, str] = field(repr=False)  # may hold secrets
    log_folder: Path
    max_restarts: int  # between two checkpoints


@dataclass(frozen=True)
class Report:
    """Result of an attempt; a trajectory is sent as a piece."""

    outcome: Piece | str | BaseException
    samples: list[SampleRecord]
    rewards: list[float]
    servers: set[str]
    table: pa.Table | None  # rows of the rollout file
    counts: tuple[int, int]  # tokens sampled since the last report, and those with a stale KV cache


@dataclass(frozen=True)
class ServerStatus:
    """A worker's view of the servers."""

    lost: frozenset[tuple[str, int]] = frozenset()  # addresses, and the weight versions that they lost
    has_servers: bool = True  # at least one server is healthy


class _Client(RemoteInferenceEngine):
    """Samples from the servers in the master's view; its executor only provides an event loop."""

    def __init__(self, config: InferenceEngineConfig, secret: str | None) -> None:
        super().__init__(config.new(fileroot=""))
        self._changed = asyncio.Event()
        self._executor = RolloutExecutor(self.config, self)
        self.loop = self._executor.loop
        self.loop.run(self._start(secret))

    async def _start(self, secret: str | None) -> None:
        await self._open(secret).load_vocabulary()

    async def follow(self, view: ClientView) -> None:
        """Apply the master's view."""
        completions = self._completions
        self._version, completions.update_timeout_s = view.version, view.update_timeout_s
        completions.backend = view.backend
        self.servers.mirror(view.servers)
        (completions.may_generate.set if view.may_generate else completions.may_generate.clear)()

    def _note_change(self) -> None:
        super()._note_change()
        self._changed.set()  # wakes only current waiters
        self._changed.clear()

    async def server_status(self, known: ServerStatus) -> ServerStatus:
        """Wait until this worker's view of the servers differs from `known`, and return it."""
        while (status := ServerStatus(self.servers.lost(), bool(self.servers.healthy))) == known:
            await self._changed.wait()
        return status

    def take_counts(self) -> tuple[int, int]:
        """Return and reset the numbers of sampled tokens."""
        completions = self._completions
        counts = completions.num_tokens, completions.num_stale_kv_tokens
        completions.num_tokens = completions.num_stale_kv_tokens = 0
        return counts


class RolloutWorker:
    """The actor; its methods run concurrently."""

    def __init__(self, spec: RolloutSpec, name: str, secret: str | None) -> None:
        os.environ.update(spec.env)
        raise_file_limit()
        write_output_to(spec.log_folder / f"{name}.log")
        heartbeat.start(name)
        self._error: BaseException | None = None  # from creating the client or the workflow
        try:
            self._client = _Client(spec.config, secret)
            self._workflow, self._should_accept = spec.make_workflow(), spec.should_accept
            self._tokenizer = copy.deepcopy(getattr(self._workflow, "tokenizer", None))  # for this thread
        except Exception as error:  # Ray would report a dead process
            traceback.print_exc()
            self._error = portable(error)
            return
        self._attempts = LocalAttempts(spec.config, self._client)

    async def follow(self, view: ClientView) -> None:
        """Apply the master's view. Raises the error of a worker that could not be created."""
        if self._error is not None:
            raise self._error
        await self._in_loop(self._client.follow(view))

    async def server_status(self, known: ServerStatus) -> ServerStatus:
        """Wait for a new view of the servers and return it. Raises if user code blocks the event loop."""
        loop = self._client.loop
        changed: asyncio.Future[Any] = asyncio.wrap_future(loop.submit(self._client.server_status(known)))
        given_up: asyncio.Future[Any] = asyncio.wrap_future(loop.watch.given_up)
        await asyncio.wait([changed, given_up], return_when=asyncio.FIRST_COMPLETED)
        status: ServerStatus = changed.result() if changed.done() else given_up.result()
        return status

    async def close(self) -> None:
        """Stop all episodes and close the workflow."""
        self._client.destroy()
        getattr(self._workflow, "close", lambda: None)()

    async def run(self, prompt_id: PromptId, row: Row, attempt: int, head_version: int) -> Report:
        """Run one attempt at a prompt."""
        return await self._in_loop(
            self._run(Prompt(prompt_id, row, self._workflow, self._should_accept), attempt, head_version)
        )

    async def _in_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(self._client.loop.submit(coroutine))

    async def _run(self, prompt: Prompt, attempt: int, head_version: int) -> Report:
        config, table = self._attempts.config, None
        episode = Episode(prompt, attempt, head_version, config.seed)
        try:
            outcome = await self._attempts.run(episode)
        except (KeyboardInterrupt, SystemExit) as error:
            raise RuntimeError(f"a workflow must not end its process: got {error!r}") from error
        if isinstance(outcome, BaseException):
            if lines_of_user := users_code(outcome):
                outcome.add_note("\n".join(["on a rollout worker:", *lines_of_user]))
            outcome = portable(outcome)
        elif not isinstance(outcome, str):
            table = table_of([episode], [outcome], [self._tokenizer], config.stored_share)
            outcome = pack(outcome, outcome.keys())
        return Report(outcome, episode.samples, episode.rewards, episode.servers, table, self._client.take_counts())
