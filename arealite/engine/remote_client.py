"""The client core that every inference server's dialect shares: generation that survives interruptions, and episodes.

`agenerate` posts, and when a server aborts (new weights) or dies it posts again with the tokens so far and a smaller
budget, so a completion is the concatenation of what servers really sampled. Invariant: token, logprob and version lists
have equal lengths, tokens received are never lost or sampled twice, the server's reply is the truth about versions.

On ranks other than 0 the engine is a receiver: batches come through collectives, everything else belongs to rank 0.
A dialect implements `_generate_call`, `_parse_segment` and `_receive_weights`.
"""

from __future__ import annotations

import abc
import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from tensordict import TensorDict

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError, ServerError
from arealite.api.io_struct import FinetuneSpec, ModelRequest, ModelResponse, PromptId, RolloutStat, WeightUpdateMeta
from arealite.api.workflow_api import RolloutWorkflow
from arealite.engine.server_http import Json, ServerHttp, StatusError, UnreachableError
from arealite.engine.server_set import Server, ServerSet, parse_addresses
from arealite.rollout.collective import RankZeroExchange
from arealite.rollout.episode import current_episode, sampling_seed
from arealite.rollout.executor import RolloutExecutor
from arealite.rollout.trajectory import split_batch

logger = logging.getLogger("arealite.client")

ADDRESSES_VARIABLE = "AREAL_LLM_SERVER_ADDRS"
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_HEALTH_S = 10.0


Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Segment:
    """What one reply added to a completion."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int] | None
    """None when the server does not tell."""
    finish: Finish


class RemoteInferenceEngine(InferenceEngine):
    """Samples from servers over HTTP and runs episodes on top of that."""

    def __init__(self, config: InferenceEngineConfig) -> None:
        self.config = config
        self.servers = ServerSet()
        self._version = 0
        self._executor: RolloutExecutor | None = None
        self._exchange = RankZeroExchange()
        self._num_loose_requests = 0
        self._num_generated_tokens = 0
        self._probes: set[asyncio.Task[None]] = set()

    # Life cycle

    def initialize(self, addr: str | None, ft_spec: FinetuneSpec | None) -> None:
        """Wait until the servers (`addr`, the config's, or the environment's) are ready and start the runtime."""
        if _rank() != 0:
            return
        addresses = parse_addresses(addr or self.config.server_addrs or os.environ.get(ADDRESSES_VARIABLE, ""))
        if not addresses:
            raise ConfigError(
                f"rollout.server_addrs or the variable {ADDRESSES_VARIABLE} must name servers: got neither. "
                "Start through a launcher, or set rollout.server_addrs=[host:port]."
            )
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
        deadline = asyncio.get_running_loop().time() + self.config.setup_timeout
        ready = await asyncio.gather(*(self._is_healthy_by(address, deadline) for address in addresses))
        silent = [address for address, is_ready in zip(addresses, ready) if not is_ready]
        if silent:
            raise ServerError(
                f"every inference server must answer GET /health within {self.config.setup_timeout:g} s: got no answer "
                f"from {', '.join(silent)}. Look at its log, or raise rollout.setup_timeout."
            )
        for address in addresses:
            self.servers.add(address)
        self.servers.note_publication(self.servers.servers, self._version)

    async def _is_healthy_by(self, address: str, deadline: float) -> bool:
        """Ask for /health with growing pauses until it answers or the deadline passes."""
        loop = asyncio.get_running_loop()
        backoff = _FIRST_BACKOFF_S
        while (remaining := deadline - loop.time()) > 0:
            try:
                await self._http.get(address, "/health", timeout_s=min(remaining, _HEALTH_S))
                return True
            except ServerError:
                await asyncio.sleep(min(backoff, max(0.0, deadline - loop.time())))
                backoff = min(2 * backoff, 1.0)
        return False

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
        seed = self._sampling_seed()
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        num_interrupts = num_fruitless = 0
        while True:
            server, segment = await self._sample(req, tokens, seed)
            tokens += segment.tokens
            logprobs += segment.logprobs
            self._num_generated_tokens += len(segment.tokens)
            versions += segment.versions or []
            if segment.finish != "abort" or len(tokens) == req.gconfig.max_new_tokens:
                break
            num_interrupts += 1
            num_fruitless = 0 if segment.tokens else num_fruitless + 1
            if num_fruitless > 1:
                # Someone else paused this server; our own pauses are waited for in `_sample`.
                await asyncio.sleep(_backoff_s(num_fruitless))
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=tokens,
            output_logprobs=logprobs,
            output_versions=versions,
            stop_reason="stop" if segment.finish == "stop" else "length",
            server=server.address,
            num_interrupts=num_interrupts,
            latency_s=time.monotonic() - started,
        )

    async def _sample(self, req: ModelRequest, tokens: list[int], seed: int) -> tuple[Server, Segment]:
        """Get the next segment after `tokens` from some server, whatever happens to others."""
        num_tokens = len(req.input_ids) + req.gconfig.max_new_tokens
        num_failures = 0
        while True:
            await self._may_generate.wait()
            server = self.servers.pick(req.rid, num_tokens)
            version = server.version
            endpoint, payload = self._generate_call(req, tokens, seed)
            try:
                reply = await self._http.post(server.address, endpoint, payload, timeout_s=self.config.request_timeout)
            except (UnreachableError, StatusError) as error:
                num_failures += 1
                if num_failures > self.config.request_retries or not _may_retry(error):
                    raise
                self._suspect(server)
                await asyncio.sleep(_backoff_s(num_failures))
                continue
            finally:
                self.servers.release(server, num_tokens)
            segment = self._parse_segment(server.address, reply, req.gconfig.max_new_tokens - len(tokens))
            if segment.versions is None:
                if server.version != version:
                    continue  # which weights sampled which token can't be known: ask again
                segment = Segment(segment.tokens, segment.logprobs, [version] * len(segment.tokens), segment.finish)
            episode = current_episode.get()
            if episode is not None:
                episode.servers.add(server.address)
            return server, segment

    def _sampling_seed(self) -> int:
        episode = current_episode.get()
        if episode is not None:
            return episode.next_sampling_seed()
        self._num_loose_requests += 1
        return sampling_seed(self.config.seed, PromptId(-1, self._num_loose_requests), sample=0, attempt=0)

    def _suspect(self, server: Server) -> None:
        """Prefer other servers until this one answers /health."""
        if server.is_reachable:
            server.is_reachable = False
            logger.warning("server %s does not answer, others take over", server.address)
            probe = asyncio.create_task(self._readmit(server))
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)

    async def _readmit(self, server: Server) -> None:
        if await self._is_healthy_by(server.address, float("inf")):
            server.is_reachable = True
            logger.warning("server %s answers again", server.address)

    # The dialect

    @abc.abstractmethod
    def _generate_call(self, req: ModelRequest, tokens: list[int], seed: int) -> tuple[str, Json]:
        """Return endpoint and payload that continue a request after `tokens`."""

    @abc.abstractmethod
    def _parse_segment(self, address: str, reply: Json, max_tokens: int) -> Segment:
        """Check a reply and return what it adds; ServerError if it breaks the protocol."""

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
        return loop.submit(loop.run(self._meet_sender(meta)))

    def set_version(self, version: int) -> None:
        """Set the version that capacity and staleness are computed from."""
        self._version = version
        if self._executor is not None:
            self._executor.set_version(version)

    def get_version(self) -> int:
        """Return the version."""
        return self._version

    # Episodes

    def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        """Queue one episode and return at once (rank 0)."""
        self._require_executor().submit(data, workflow)

    def wait(
        self, count: int, timeout: float | None = None, should_accept: Callable[[TensorDict], bool] | None = None
    ) -> TensorDict:
        """Return `count` accepted trajectories, oldest first (rank 0). Raises TimeoutError, and then loses nothing."""
        return self._require_executor().wait(count, timeout, should_accept)

    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> TensorDict:
        """Run one episode per item of rank 0's `data` now and return this rank's share of what was accepted."""
        return self._exchange.scatter(
            lambda world_size: split_batch(self._require_executor().run_all(data, workflow), world_size)
        )

    def prepare_batch(
        self,
        dataloader: Iterable[list[dict[str, Any]]],
        workflow: RolloutWorkflow,
        should_accept: Callable[[TensorDict], bool] | None = None,
    ) -> TensorDict:
        """Keep episodes in flight and return this rank's share of the next batch of bounded staleness."""
        return self._exchange.scatter(
            lambda world_size: split_batch(
                self._require_executor().prepare_batch(dataloader, workflow, should_accept), world_size
            )
        )

    def evaluate_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> dict[str, float]:
        """Run one episode per item of rank 0's `data` now and return means over all samples.

        `num_failed` counts the items that are in no mean, because their episode failed or was rejected.
        """

        def evaluate(world_size: int) -> list[dict[str, float]]:
            batch = self._require_executor().run_all(data, workflow, is_evaluation=True)
            num_failed = len(data) - batch["group_index"].unique().numel()
            return [_means(batch) | {"num_failed": float(num_failed)}] * world_size

        return self._exchange.scatter(evaluate)

    def pause(self) -> None:
        """Start no new episodes; generation goes on."""
        if self._executor is not None:
            self._executor.pause()

    def resume(self) -> None:
        """Start episodes again."""
        if self._executor is not None:
            self._executor.resume()

    @property
    def stats(self) -> RolloutStat:
        """Counts of episodes since the run began (rank 0)."""
        return self._require_executor().stats

    def metrics(self) -> dict[str, float]:
        """Return the counts of episodes and sampled tokens by metric name; empty on ranks other than 0."""
        if self._executor is None:
            return {}
        return self._executor.metrics() | {"rollout/generated_tokens": float(self._num_generated_tokens)}

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
    return not isinstance(error, StatusError) or error.status >= 500


def _backoff_s(num_failures: int) -> float:
    return min(_FIRST_BACKOFF_S * 2.0 ** (num_failures - 1), _MAX_BACKOFF_S)
