"""The client core that every inference server's dialect shares: generation that survives interruptions, and episodes.

`agenerate` posts, and when a server aborts (new weights) or dies it posts again with the tokens so far and a smaller
budget, so a completion is the concatenation of what servers really sampled. Invariant: token, logprob and version lists
have equal lengths, tokens received are never lost or sampled twice, the server's reply is the truth about versions.

On ranks other than 0 the engine is a receiver: batches come through collectives, everything else belongs to rank 0.
A dialect implements its abstract methods.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.distributed as dist
from tensordict import TensorDict

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError, ContextOverflowError, ServerError, UnreachableError, WeightUpdateError
from arealite.api.io_struct import FinetuneSpec, ModelRequest, ModelResponse, PromptId, RolloutStat, WeightUpdateMeta
from arealite.api.workflow_api import RolloutWorkflow
from arealite.engine.liveness import Liveness
from arealite.engine.replay import Player
from arealite.engine.server_http import Json, ServerHttp, StatusError
from arealite.engine.server_set import Server, ServerSet, parse_addresses
from arealite.rollout.collective import RankZeroExchange
from arealite.rollout.episode import SampleRecord, current_episode, sampling_seed
from arealite.rollout.executor import RolloutExecutor
from arealite.rollout.trajectory import split_batch
from arealite.utils import beacon
from arealite.utils.environment import SERVER_ADDRS_VARIABLE
from arealite.utils.garbage import QuietCollector

logger = logging.getLogger("arealite.client")

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_RESUME_GRACE_S = 60.0
"""Added to the deadline of a publication before a request stops to wait for its end."""

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Segment:
    """What one reply added to a completion."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int] | None
    """None when the server does not tell."""
    finish: Finish
    stale_kv_tokens: int = 0
    """Tokens sampled on keys and values of older weights than their version says."""


@dataclass(frozen=True)
class Canary:
    """What one server sampled to prove its weights."""

    address: str
    dtype: str | None
    """In which it computes; None when it does not tell."""
    tokens: list[int]
    logprobs: list[float]
    versions: list[int] | None


class RemoteInferenceEngine(InferenceEngine):
    """Samples from servers over HTTP and runs episodes on top of that."""

    def __init__(self, config: InferenceEngineConfig) -> None:
        self.config = config
        self.servers = ServerSet()
        self._version = 0
        self._executor: RolloutExecutor | None = None
        self._player: Player | None = None
        """Takes the executor's place in a replay."""
        self._exchange = RankZeroExchange()
        self._num_loose_requests = 0
        self._num_generated_tokens = 0
        self._num_stale_kv_tokens = 0
        self.canary_gap: float | None = None
        """Largest difference per token between a server's logprobs and the trainer's at the last publication."""
        self._publication_s = config.weight_update_timeout
        """Deadline of the last publication."""

    # Life cycle

    def initialize(self, addr: str | None, ft_spec: FinetuneSpec | None) -> None:
        """Wait until the servers (`addr`, the config's, or the environment's) are ready and start the runtime."""
        if _rank() != 0:
            return
        if self.config.replay_from:
            self._player = Player(self.config.replay_from)
            return
        addresses = parse_addresses(addr or self.config.server_addrs or os.environ.get(SERVER_ADDRS_VARIABLE, ""))
        if not addresses:
            raise ConfigError(
                f"rollout.server_addrs or the variable {SERVER_ADDRS_VARIABLE} must name servers: got neither. "
                "Start through a launcher, or set rollout.server_addrs=[host:port]."
            )
        self._collector = QuietCollector()
        self._executor = RolloutExecutor(self.config, self)
        try:
            self._executor.loop.run(self._connect(addresses))
        except BaseException:
            self.destroy()
            raise

    def destroy(self) -> None:
        """Stop the runtime; servers are left running."""
        if self._executor is None:
            return
        try:
            self._executor.close()
        finally:
            self._executor = None

    async def _connect(self, addresses: list[str]) -> None:
        self._http = ServerHttp()
        self._require_executor().loop.closers.append(self._http.close)
        self._may_generate = asyncio.Event()
        self._may_generate.set()
        self._liveness = Liveness(self._http, self.servers, self._may_generate)
        deadline = asyncio.get_running_loop().time() + self.config.setup_timeout
        ready = await asyncio.gather(*(self._liveness.is_healthy_by(address, deadline) for address in addresses))
        silent = [address for address, is_ready in zip(addresses, ready) if not is_ready]
        if silent:
            raise ServerError(
                f"every inference server must answer GET /health within {self.config.setup_timeout:g} s: got no answer "
                f"from {', '.join(silent)}. Look at its log, or raise rollout.setup_timeout."
            )
        for address in addresses:
            self.servers.add(address)
        beacon.report("servers", lambda: [vars(server) for server in self.servers.servers])
        self.servers.note_publication(self.servers.servers, self._version)

    # Generation

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one completion, continuing token-exactly when a server interrupts it."""
        if req.gconfig.n_samples != 1:
            raise ValueError(
                f"gconfig.n_samples must be 1 in a request: got {req.gconfig.n_samples}. "
                "Send one request per sample with gconfig.new(n_samples=1)."
            )
        if not req.input_ids:
            raise ValueError("input_ids must have at least one token: got none. Send a prompt.")
        executor = self._require_executor()
        if asyncio.get_running_loop() is not executor.loop.loop:
            return await asyncio.wrap_future(executor.loop.submit(self._generate(req)))
        return await self._generate(req)

    async def _generate(self, req: ModelRequest) -> ModelResponse:
        started = time.monotonic()
        sample, seed = self._next_sample()
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        num_interrupts = num_fruitless = 0
        progressed = started
        while True:
            server, segment = await self._sample(req, tokens, seed)
            tokens += segment.tokens
            logprobs += segment.logprobs
            self._num_generated_tokens += len(segment.tokens)
            self._num_stale_kv_tokens += segment.stale_kv_tokens
            versions += segment.versions or []
            if segment.finish != "abort" or len(tokens) == req.gconfig.max_new_tokens:
                break
            num_interrupts += 1
            num_fruitless = 0 if segment.tokens else num_fruitless + 1
            if num_fruitless > 1:
                # Someone else paused this server; our own pauses are waited for in `_sample`.
                self._refuse_standstill(server, progressed, num_fruitless)
                await asyncio.sleep(_backoff_s(num_fruitless))
            else:
                progressed = time.monotonic()
        latency_s = time.monotonic() - started
        episode = current_episode.get()
        if episode is not None:
            episode.samples.append(SampleRecord(sample, len(tokens), latency_s, num_interrupts, server.address))
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=tokens,
            output_logprobs=logprobs,
            output_versions=versions,
            stop_reason="stop" if segment.finish == "stop" else "length",
            server=server.address,
            num_interrupts=num_interrupts,
            latency_s=latency_s,
        )

    async def _sample(self, req: ModelRequest, tokens: list[int], seed: int) -> tuple[Server, Segment]:
        """Get the next segment after `tokens` from some server, whatever happens to others."""
        num_tokens = len(req.input_ids) + req.gconfig.max_new_tokens
        failed: list[Server] = []
        while True:
            await self._wait_for_publication()
            server = self.servers.pick(req.rid, num_tokens, avoid=set(failed))
            version = server.version
            try:
                segment = await self._ask(server, req, tokens, seed)
            except ServerError as error:
                failed.append(server)
                if len(failed) > self.config.request_retries or not _may_retry(error):
                    raise
                self._liveness.suspect(server)
                await asyncio.sleep(_backoff_s(len(failed)))
                continue
            finally:
                self.servers.release(server, num_tokens)
            if segment.versions is None:
                if server.version != version:
                    continue  # which weights sampled which token can't be known: ask again
                segment = replace(segment, versions=[version] * len(segment.tokens))
            if segment.versions and min(segment.versions) < version:
                self.servers.note_loss(server, version)
                logger.warning(
                    "server %s has lost weights %d and idles until the next: it sampled from %d. It must have started "
                    "anew.",
                    *(server.address, version, min(segment.versions)),
                )
                continue
            episode = current_episode.get()
            if episode is not None:
                episode.servers.add(server.address)
            return server, segment

    async def _ask(self, server: Server, req: ModelRequest, tokens: list[int], seed: int) -> Segment:
        """Let one server continue a request."""
        endpoint, payload = self._generate_call(req, tokens, seed)
        try:
            reply = await self._liveness.post(server, endpoint, payload, timeout_s=self.config.request_timeout)
        except StatusError as error:
            if self._is_overflow(error):
                raise ContextOverflowError(
                    f"a request must fit into the context of {server.address}: got {len(req.input_ids)} tokens that "
                    f"may become {len(req.input_ids) + req.gconfig.max_new_tokens}. Drop long prompts, lower "
                    f"max_new_tokens or serve with a larger context. The server: {error}"
                ) from error
            raise
        beacon.tick()
        return self._parse_segment(server.address, reply, req.gconfig.max_new_tokens - len(tokens))

    async def _wait_for_publication(self) -> None:
        """Wait while a publication of weights pauses the servers."""
        if self._may_generate.is_set():
            return
        limit_s = self._publication_s + _RESUME_GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                await self._may_generate.wait()
        except TimeoutError:
            raise ServerError(
                f"servers must go on within {limit_s:g} s after a publication of weights began: they did not. "
                "Look for the failed update in the log of the trainer."
            ) from None

    def _refuse_standstill(self, server: Server, progressed: float, num_aborts: int) -> None:
        """Raise when a server does nothing but abort for longer than any answer may take."""
        if time.monotonic() - progressed > self.config.request_timeout:
            raise ServerError(
                f"http://{server.address} must sample a token within {self.config.request_timeout:g} s: got "
                f"{num_aborts} empty aborts in a row. Someone has paused it; let it continue."
            )

    def _next_sample(self) -> tuple[int, int]:
        """Return number and sampling seed of the next completion."""
        episode = current_episode.get()
        if episode is not None:
            sample = episode.next_sample()
            return sample, episode.sampling_seed(sample)
        self._num_loose_requests += 1
        return 0, sampling_seed(self.config.seed, PromptId(-1, self._num_loose_requests), sample=0, attempt=0)

    # The dialect

    @abc.abstractmethod
    def _generate_call(self, req: ModelRequest, tokens: list[int], seed: int) -> tuple[str, Json]:
        """Return endpoint and payload that continue a request after `tokens`."""

    @abc.abstractmethod
    def _parse_segment(self, address: str, reply: Json, max_tokens: int) -> Segment:
        """Check a reply and return what it adds; ServerError if it breaks the protocol."""

    @abc.abstractmethod
    def _is_overflow(self, error: StatusError) -> bool:
        """Tell whether a server refused a request because its context is too short."""

    @abc.abstractmethod
    def _canary_call(self, req: ModelRequest, seed: int) -> tuple[str, Json]:
        """Return endpoint and payload of a completion that only the token limit ends."""

    @abc.abstractmethod
    async def _meet_sender(self, meta: WeightUpdateMeta) -> Coroutine[Any, Any, None]:
        """Fill in what the sender must know, and return the coroutine that brings the weights to every live server."""

    # Weights and versions

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        """Start the receiving half of a publication; `meta` is complete for the sender on return.

        The same `meta` may be used every time. Raises WeightUpdateError if the servers can't even be told.
        """
        loop = self._require_executor().loop
        if meta.version in (None, meta.last_version):
            meta.version = self.get_version() + 1
        meta.last_version = meta.version
        meta.uploaded = Future()
        self._publication_s = meta.timeout_s
        return loop.submit(loop.run(self._meet_sender(meta)))

    def sample_canaries(self, req: ModelRequest, version: int) -> list[Canary]:
        """Let every server that `version` was published to complete `req`, whatever pauses episodes (rank 0)."""
        return self._require_executor().loop.run(self._sample_canaries(req, version))

    async def _sample_canaries(self, req: ModelRequest, version: int) -> list[Canary]:
        servers = [server for server in self.servers.servers if server.version == version]
        try:
            canaries = await asyncio.gather(*(self._sample_canary(server, req) for server in servers))
            if not any(canaries):
                raise ServerError(f"one of {[server.address for server in servers]} must be reachable: got none.")
        except ServerError as error:
            raise WeightUpdateError(f"servers must sample from their weights of version {version}: {error}") from error
        return [canary for canary in canaries if canary is not None]

    async def _sample_canary(self, server: Server, req: ModelRequest) -> Canary | None:
        """Return what the server sampled; None if it is gone, which is no fault of its weights."""
        num_failures = 0
        while True:
            try:
                return await self._ask_canary(server, req)
            except ServerError as error:
                num_failures += 1
                if num_failures <= self.config.request_retries and _may_retry(error):
                    await asyncio.sleep(_backoff_s(num_failures))
                elif isinstance(error, UnreachableError):
                    self._liveness.suspect(server)
                    return None
                else:
                    raise

    async def _ask_canary(self, server: Server, req: ModelRequest) -> Canary:
        timeout_s = self.config.weight_update_timeout
        seed = sampling_seed(self.config.seed, PromptId(-1, 0), sample=0, attempt=0)
        endpoint, payload = self._canary_call(req, seed)
        tells_dtype = self.config.backend == "lite"
        model = await self._http.get(server.address, "/model_info", timeout_s=timeout_s) if tells_dtype else {}
        reply = await self._http.post(server.address, endpoint, payload, timeout_s=timeout_s)
        segment = self._parse_segment(server.address, reply, req.gconfig.max_new_tokens)
        if not segment.tokens:
            raise ServerError(f"{server.address} must sample a canary's tokens: got none. Leave pausing it to us.")
        return Canary(server.address, model.get("dtype"), segment.tokens, segment.logprobs, segment.versions)

    def set_version(self, version: int) -> None:
        """Set the version that capacity and staleness are computed from."""
        self._version = version
        if self._executor is not None:
            self._executor.set_version(version)
            self._collector.collect()

    def get_version(self) -> int:
        """Return the version."""
        return self._version

    # Episodes

    def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        """Queue one episode and return at once (rank 0)."""
        if self._player is None:
            self._require_executor().submit(data, workflow)

    def wait(
        self, count: int, timeout: float | None = None, should_accept: Callable[[TensorDict], bool] | None = None
    ) -> TensorDict:
        """Return `count` accepted trajectories, oldest first (rank 0). Raises TimeoutError, and then loses nothing."""
        if self._player is not None:
            return self._player.play(self._version)
        return self._require_executor().wait(count, timeout, should_accept)

    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> TensorDict:
        """Run one episode per item of rank 0's `data` now and return this rank's share of what was accepted."""
        return self._share_out(lambda: self._require_executor().run_all(data, workflow))

    def prepare_batch(
        self,
        dataloader: Iterable[list[dict[str, Any]]],
        workflow: RolloutWorkflow,
        should_accept: Callable[[TensorDict], bool] | None = None,
    ) -> TensorDict:
        """Keep episodes in flight and return this rank's share of the next batch of bounded staleness."""
        return self._share_out(lambda: self._require_executor().prepare_batch(dataloader, workflow, should_accept))

    def _share_out(self, collect: Callable[[], TensorDict]) -> TensorDict:
        """Collect a batch on rank 0, or play one, and return this rank's share."""

        def shares(world_size: int) -> list[TensorDict]:
            batch = collect() if self._player is None else self._player.play(self._version)
            return split_batch(batch, world_size)

        return self._exchange.scatter(shares)

    def evaluate_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> dict[str, float]:
        """Run one episode per item of rank 0's `data` now and return means over all samples.

        `num_failed` counts the items that are in no mean, because their episode failed or was rejected.
        """

        def evaluate(world_size: int) -> list[dict[str, float]]:
            if self._player is None:
                batch = self._require_executor().run_all(data, workflow, is_evaluation=True)
            else:
                batch = self._player.play(self._version, is_evaluation=True)
            num_failed = len(data) - batch["group_index"].unique().numel()
            return [_means(batch) | {"num_failed": float(num_failed)}] * world_size

        return self._exchange.scatter(evaluate)

    def pause(self) -> None:
        """Start no new episodes; generation goes on."""
        if self._executor is not None:
            self._executor.pause()

    def resume(self) -> None:
        """Start episodes again, and let requests go on that a publication holds."""
        if self._executor is not None:
            self._executor.loop.run(self._let_generate())
            self._executor.resume()

    async def _let_generate(self) -> None:
        self._may_generate.set()

    def state_dict(self) -> dict[str, Any]:
        """Make what became of all prompts durable, and return what `load_state_dict` needs; empty except on rank 0."""
        if self._executor is None:
            return {}
        counts = {"generated_tokens": self._num_generated_tokens, "stale_kv_tokens": self._num_stale_kv_tokens}
        return self._executor.state_dict() | counts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, before the first episode: what came after it is undone, and what was open then is
        issued again at the next `prepare_batch`."""
        if self._executor is not None:
            self._executor.load_state_dict(state)
            self._num_generated_tokens = state["generated_tokens"]
            self._num_stale_kv_tokens = state["stale_kv_tokens"]

    def note_checkpoint(self, step: int, position: int) -> None:
        """Note that a published checkpoint holds the updates up to a step and the ledger up to a position."""
        if self._executor is not None:
            self._executor.note_checkpoint(step, position)

    @property
    def stats(self) -> RolloutStat:
        """Counts of episodes since the run began (rank 0)."""
        return self._require_executor().stats

    def metrics(self) -> dict[str, float]:
        """Return the counts of episodes and sampled tokens by metric name; empty on ranks other than 0."""
        if self._executor is None:
            return {}
        metrics = self._executor.metrics() | {
            "rollout/generated_tokens": float(self._num_generated_tokens),
            "rollout/stale_kv_tokens": float(self._num_stale_kv_tokens),
        }
        return metrics if self.canary_gap is None else metrics | {"policy/canary_gap": self.canary_gap}

    def _require_executor(self) -> RolloutExecutor:
        if self._executor is None:
            raise RuntimeError(
                f"the inference engine must be initialized, and used on rank 0: got rank {_rank()}. "
                "Call initialize first; on other ranks only the collective methods work."
            )
        return self._executor


def _means(batch: TensorDict) -> dict[str, float]:
    """Return the means over samples that an evaluation reports."""
    means = {
        "reward": batch["rewards"].double().mean().item(),
        "tokens": batch["loss_mask"].bool().sum(1).double().mean().item(),
        "num_samples": float(batch.batch_size[0]),
    }
    if "no_eos" in set(batch.keys()):
        means["no_eos"] = batch["no_eos"].double().mean().item()
    return means


def _rank() -> int:
    """Return the global rank, also before torch.distributed is initialised."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _may_retry(error: ServerError) -> bool:
    is_refusal = isinstance(error, StatusError) and error.status < 500
    return not (is_refusal or isinstance(error, ContextOverflowError))


def _backoff_s(num_failures: int) -> float:
    return min(_FIRST_BACKOFF_S * 2.0 ** (num_failures - 1), _MAX_BACKOFF_S)
