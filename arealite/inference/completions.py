"""Completions from servers that may interrupt them, come and go, or get new weights at any moment. When a server aborts
or dies, `generate` posts again with the tokens so far and a smaller budget. Invariant: token, logprob and version lists
have equal lengths, tokens received are never lost or sampled twice, and the server's reply is the truth about versions.
While no server has the newest weights, requests wait and the clocks of their episodes stop."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError, ContextOverflowError, ServerError, UnreachableError
from arealite.api.io_struct import ModelRequest, ModelResponse, PromptId
from arealite.inference.backends.base import Backend, Segment
from arealite.inference.health import Health, MovedError
from arealite.inference.http import OutOfFilesError, ServerConnection, StatusError, deadline_in, now
from arealite.inference.pool import Server, ServerFacts, ServerPool, backoff_s
from arealite.rollout.prompts import SampleRecord, current_episode, sampling_seed
from arealite.utils import heartbeat
from arealite.utils.background import in_thread
from arealite.utils.hf import load_hf_tokenizer, vocab_size
from arealite.utils.token_ids import StopStrings

logger = logging.getLogger("arealite.client")

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_RESUME_GRACE_S = 60.0  # how much longer than a weight update may take a request waits for its end


@dataclass
class _Sampled:
    """The tokens of a completion so far, over all servers that sampled some."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)

    def extend(self, segment: Segment, versions: list[int]) -> None:
        self.tokens += segment.tokens
        self.logprobs += segment.logprobs
        self.versions += versions
        self.kept += segment.kept or [[]] * len(segment.tokens)

    def truncate(self, count: int) -> None:
        """Drop all tokens after the first `count`."""
        del self.tokens[count:], self.logprobs[count:], self.versions[count:], self.kept[count:]


class Completions:
    """Lets servers complete requests; must be created and used in one event loop."""

    def __init__(
        self, config: InferenceEngineConfig, backend: Backend, servers: ServerPool, session: aiohttp.ClientSession
    ) -> None:
        self.may_generate = asyncio.Event()  # cleared while a weight update pauses the servers
        self.may_generate.set()
        self.held_s = 0.0  # for which weight updates have paused the servers since the last metrics
        self._held_at = 0.0
        self.on_hold: Callable[[], Awaitable[None]] | None = None  # lets other clients hold or release theirs, too
        self.update_timeout_s = config.weight_update_timeout  # timeout of the last weight update
        self.num_tokens = 0  # sampled so far
        self.num_stale_kv_tokens = 0
        self.health = Health(session, servers, self.may_generate)
        self._gate = asyncio.Lock()  # long replies pass it one by one
        self.config, self.backend, self.servers = config, backend, servers
        self._changed = asyncio.Event()  # set and replaced when the servers have changed
        self._deserted_at: float | None = None  # since when no server can take a request
        self._queue: deque[asyncio.Future[Server | None]] = deque()  # of requests that wait for a slot, oldest first
        self.are_asleep = False  # whether servers have given their memory back until the next weight update
        self._num_loose_requests = 0
        self._tokenizer: asyncio.Task[Any] | None = None
        self._vocab_size: int | None = None  # unknown without a tokenizer path

    async def connect(self, addresses: list[str]) -> None:
        """Wait until all servers are ready, check what they support, and add them to the pool."""
        facts = await asyncio.gather(*map(self.meet, addresses))
        for address, one in zip(addresses, facts, strict=True):
            self.servers.add(address, one)

    async def meet(self, address: str) -> ServerFacts:
        """Wait until a server is ready, and inspect it; its weights may be any until the first weight update."""
        deadline = deadline_in(self.config.setup_timeout)
        if await self.health.answers_by(deadline, address, "/"):
            connection = self.connection(address, deadline)
            facts = await self.backend.meet(connection)
            await self.backend.take_over(connection)
            if await self.health.answers_by(deadline, address):
                return facts
        raise UnreachableError(
            f"every inference server must answer GET /health within {self.config.setup_timeout:g} s: got no answer "
            f"from {address}. Look at its log, or raise rollout.setup_timeout."
        )

    def connection(self, address: str, deadline: float) -> ServerConnection:
        """Return what sends an operation's requests to one server."""
        return ServerConnection(self.health.session, address, deadline, self._gate)

    async def load_vocabulary(self) -> None:
        """Find out which token ids the model has, if the tokenizer is known, and refuse servers that have others."""
        if self.config.tokenizer_path:
            path = self.config.tokenizer_path
            self._vocab_size = ours = await in_thread(vocab_size, path)
            for server in self.servers.servers:
                if ours is not None and (theirs := server.facts.vocab_size) not in (None, ours):
                    raise ConfigError(
                        f"http://{server.address} must serve a model with the vocabulary of {path}: got {theirs} token "
                        f"ids and {ours}. Correct the server's model, or ours."
                    )

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot of a server."""
        return len(self._queue)

    def count(self, num_tokens: int, num_stale_kv_tokens: int) -> None:
        """Count tokens that were sampled, here or by another process for this one."""
        self.num_tokens += num_tokens
        self.num_stale_kv_tokens += num_stale_kv_tokens

    async def hold(self) -> None:
        """Let requests wait, before servers pause for a weight update."""
        if self.may_generate.is_set():
            self._held_at = now()
        self.may_generate.clear()
        if self.on_hold is not None:
            await self.on_hold()

    async def release(self) -> None:
        """Let requests go on."""
        if not self.may_generate.is_set():
            self.held_s += now() - self._held_at
        self.may_generate.set()
        if self.on_hold is not None:
            await self.on_hold()

    async def sleep(self) -> None:
        """Let servers give back their memory until a weight update; requests return with the tokens so far and wait.

        Raises ServerError if one does not within the time of an update, and may still hold its memory.
        """
        await self.hold()
        servers, deadline = self.servers.servers, deadline_in(self.config.weight_update_timeout)
        sleeping = [self.backend.sleep(self.connection(one.address, deadline)) for one in servers]
        try:
            outcomes = await asyncio.gather(*sleeping, return_exceptions=True)
        finally:
            self.are_asleep = True
            for server in servers:
                self.servers.mark_weights_lost(server, server.version)
            await self.release()
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, UnreachableError):  # it has ended, and its memory is free
                self.health.suspect(server)
            elif isinstance(outcome, BaseException):
                raise outcome

    def note_change(self) -> None:
        """Wake what waits for a server (called when servers have changed)."""
        if self.servers.serving:
            self._deserted_at, self.are_asleep = None, False
        elif self._deserted_at is None:
            self._deserted_at = now()
        self._changed.set()
        self._changed = asyncio.Event()
        if not self._queue and any(server.num_in_flight == 0 for server in self.servers.serving):
            self.health.balance()
        for server in self.servers.serving if self._queue else ():
            for _ in range(int(min(len(self._queue), server.num_free))):
                self._hand_on(server)
        while self._queue and not self.servers.serving:
            self._hand_on(None)  # the clocks of their episodes stop

    def _release(self, server: Server, num_tokens: int) -> None:
        self.servers.release(server, num_tokens)
        self._hand_on(server)

    def _hand_on(self, server: Server | None) -> None:
        """Let the oldest request that waits for a slot take one of this server, or look for any."""
        while self._queue:
            if not (place := self._queue.popleft()).done():
                return place.set_result(server)

    async def wait_for_updatable(self) -> None:
        """Wait until a server can take part in a weight update. Raises TimeoutError after `rollout.setup_timeout`."""
        async with asyncio.timeout(self.config.setup_timeout):
            while not self.servers.updatable:
                await self._changed.wait()

    async def generate(self, req: ModelRequest) -> ModelResponse:
        """Sample one completion. Raises ValueError for token ids that the model does not have."""
        self._check_ids(req.input_ids)
        started = progressed = now()
        sample, seed = self._next_sample(req)
        episode = current_episode.get()
        max_tokens = len(req.input_ids) + req.gconfig.max_new_tokens
        sampled = _Sampled()
        failed: list[Server] = []
        num_interrupts = num_fruitless = 0
        while True:
            server = await self._pick(req.rid, max_tokens, failed)
            version, began = server.version, now()
            try:
                segment = await self._ask(server, req, sampled.tokens, seed, failed)
            finally:
                self._release(server, max_tokens)
            if segment is None:
                continue
            heartbeat.tick()
            self.servers.measure(server, len(segment.tokens), now() - began)
            segment_versions = self._versions_of(segment, server, version)
            if segment_versions is None:
                continue
            failed.clear()
            if episode is not None:
                episode.servers.add(server.address)
                episode.newest_version = max(episode.newest_version, max(segment_versions, default=-1))
            sampled.extend(segment, segment_versions)
            self.count(len(segment.tokens), segment.stale_kv_tokens)
            if segment.finish != "abort" or len(sampled.tokens) == req.gconfig.max_new_tokens:
                break
            num_interrupts += 1
            self.servers.forget(req.rid)  # its cache is gone
            if req.gconfig.stop:
                # The server that continues looks for stop strings in its own output only.
                sampled.truncate(await self._num_settled(sampled.tokens, req.gconfig.stop))
            num_fruitless = 0 if segment.tokens else num_fruitless + 1
            if num_fruitless > 1:
                # Someone else paused this server; our own pauses are waited for in `_pick`.
                self._refuse_standstill(server, progressed, num_fruitless)
                await asyncio.sleep(backoff_s(num_fruitless, _FIRST_BACKOFF_S, _MAX_BACKOFF_S))
            else:
                progressed = now()
        latency_s = now() - started
        if episode is not None:
            episode.samples.append(SampleRecord(sample, len(sampled.tokens), latency_s, num_interrupts, server.address))
            episode.is_narrowed |= req.gconfig.narrows
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=sampled.tokens,
            output_logprobs=sampled.logprobs,
            output_versions=sampled.versions,
            stop_reason="stop" if segment.finish == "stop" else "length",
            server=server.address,
            output_kept=sampled.kept if all(sampled.kept) else None,
            matched_stop=segment.matched_stop,
            num_interrupts=num_interrupts,
            latency_s=latency_s,
        )

    async def _ask(
        self, server: Server, req: ModelRequest, tokens: list[int], seed: int, failed: list[Server]
    ) -> Segment | None:
        """Let a server continue `tokens`; return None, with the server in `failed`, if another one may do better."""
        connection = self.connection(server.address, deadline_in(self.config.request_timeout))
        try:
            async with self.health.in_flight(server):
                return await self.backend.complete(connection, req, tokens, seed)
        except MovedError:
            self.servers.forget(req.rid)
            return None
        except ServerError as error:
            failed.append(server)
            if len(failed) > self.config.request_retries or not _may_retry(error):
                raise
            if not isinstance(error, OutOfFilesError):
                self.health.suspect(server)
            await asyncio.sleep(backoff_s(len(failed), _FIRST_BACKOFF_S, _MAX_BACKOFF_S))
            return None

    def _versions_of(self, segment: Segment, server: Server, version: int) -> list[int] | None:
        """Return the version of each token of a request that was sent at `version`; None means to ask again."""
        if segment.versions is None and not server.tells_versions:
            # Which weights sampled which token can't be known if they have changed meanwhile.
            return [version] * len(segment.tokens) if server.version == version else None
        if segment.versions is None or min(segment.versions, default=version) < version:
            self.servers.mark_weights_lost(server, version)
            logger.warning(
                "server %s has lost weights %d and idles until the next update: it sampled from %s. It must have "
                "restarted.",
                *(server.address, version, "no version" if segment.versions is None else min(segment.versions)),
            )
            return None
        server.tells_versions |= bool(segment.versions)
        return segment.versions

    async def _pick(self, rid: str, num_tokens: int, failed: list[Server]) -> Server:
        """Choose a server; while there is none wait, and stop the clock of the episode."""
        episode, freed = current_episode.get(), None
        with contextlib.ExitStack() as standstill:
            while True:
                changed = self._changed
                await self._wait_for_update()
                server = self.servers.pick(rid, num_tokens, set(failed), freed)
                if server is not None:
                    return server
                if self.servers.serving:
                    freed = None if freed is not None else await self._wait_for_slot()
                    continue
                if episode is not None:
                    standstill.enter_context(episode.standstill())
                self._deserted_at = self._deserted_at or now()
                key = "request_timeout" if self.are_asleep else "setup_timeout"  # the trainer computes meanwhile
                limit_s: float = getattr(self.config, key)
                try:
                    async with asyncio.timeout_at(self._deserted_at + limit_s):
                        await changed.wait()
                except TimeoutError:
                    raise ServerError(
                        f"an inference server with weights of version {self.servers.version} must be there within "
                        f"{limit_s:g} s: got {self.servers.describe()}. Look at the servers' logs, start others, or "
                        f"raise rollout.{key}."
                    ) from None

    async def _wait_for_slot(self) -> Server | None:
        """Wait for a server with a free slot, as long as a request may take, since one that runs ends by then; None
        once no server serves."""
        place: asyncio.Future[Server | None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        try:
            async with asyncio.timeout(limit_s := self.config.request_timeout):
                server = await place
            await self._wait_for_update()
        except BaseException as error:
            if place.done() and not place.cancelled():
                self._hand_on(place.result())
            if not isinstance(error, TimeoutError):
                raise
            raise ServerError(
                f"a server must have a free slot within {limit_s:g} s: got {self.servers.num_slots} slots, all taken. "
                "Start more servers, or lower rollout.max_concurrent_rollouts."
            ) from None
        return server

    async def _wait_for_update(self) -> None:
        if self.may_generate.is_set():
            return
        limit_s = 3 * self.update_timeout_s + _RESUME_GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                await self.may_generate.wait()
        except TimeoutError:
            raise ServerError(
                f"servers must resume within {limit_s:g} s after a weight update began: they did not. "
                "Look for the failed update in the log of the trainer."
            ) from None

    async def _num_settled(self, tokens: list[int], stops: list[str]) -> int:
        """Return how many tokens of an interrupted output can't be part of an unfinished stop string."""
        if self._tokenizer is None:
            path = self.config.tokenizer_path
            self._tokenizer = asyncio.create_task(in_thread(load_hf_tokenizer, path))
        return StopStrings(await asyncio.shield(self._tokenizer), stops).num_settled(tokens)

    def _refuse_standstill(self, server: Server, progressed: float, num_aborts: int) -> None:
        """Raise when a server has only aborted for longer than a request may take."""
        if now() - progressed > self.config.request_timeout:
            raise ServerError(
                f"http://{server.address} must sample a token within {self.config.request_timeout:g} s: got "
                f"{num_aborts} empty aborts in a row. Someone has paused it; let it continue."
            )

    def _check_ids(self, input_ids: list[int]) -> None:
        """Refuse what would kill an SGLang server."""
        smallest, largest = min(input_ids), max(input_ids)
        if smallest < 0 or (self._vocab_size is not None and largest >= self._vocab_size):
            raise ValueError(
                f"input_ids must be tokens of the model, from 0 to {(self._vocab_size or largest + 1) - 1}: got "
                f"{smallest if smallest < 0 else largest}. Use the model's own tokenizer."
            )

    def _next_sample(self, req: ModelRequest) -> tuple[int, int]:
        """Return number and sampling seed of the next completion."""
        episode = current_episode.get()
        if episode is not None:
            return episode.next_sample(req)
        if "seed" in req.metadata:
            return 0, req.metadata["seed"]
        self._num_loose_requests += 1
        return 0, sampling_seed(self.config.seed, PromptId(-1, self._num_loose_requests), sample=0, attempt=0)

    async def sample_canary(self, server: Server, req: ModelRequest) -> Segment | ServerError:
        """Return what a server samples, whatever pauses episodes, or its error after as many tries as any request."""
        seed = sampling_seed(self.config.seed, PromptId(-1, 0), sample=0, attempt=0)
        connection = self.connection(server.address, deadline_in(self.config.weight_update_timeout))
        num_failures = 0
        while True:
            try:
                segment = await self.backend.complete(connection, req, [], seed, ignore_eos=True)
                if not segment.tokens:
                    raise ServerError(
                        f"{server.address} must sample a canary's tokens: got none. Leave pausing it to us."
                    )
                server.tells_versions |= segment.versions is not None
                return segment
            except ServerError as error:
                num_failures += 1
                pause_s = backoff_s(num_failures, _FIRST_BACKOFF_S, _MAX_BACKOFF_S)
                is_left = num_failures <= self.config.request_retries and deadline_in(pause_s) < connection.deadline
                if not (is_left and _may_retry(error)):
                    await self.health.dead_among([server])
                    return error
                await asyncio.sleep(pause_s)


def _may_retry(error: ServerError) -> bool:
    is_refusal = isinstance(error, StatusError) and error.status < 500
    return not (is_refusal or isinstance(error, ContextOverflowError))
