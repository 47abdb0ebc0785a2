"""The client that every kind of server shares: servers, episodes, weights and versions as one `InferenceEngine`. On
ranks other than 0 it is a receiver: batches come through collectives, everything else belongs to rank 0. A server that
joins while the trainer waits for a batch gets the current weights then, otherwise at the next weight update."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp
from tensordict import TensorDict

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.config.rollout import ColocatedConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError
from arealite.api.io_struct import (
    FinetuneSpec,
    ModelRequest,
    ModelResponse,
    RolloutStat,
    WeightTransfer,
    WeightUpdateMeta,
)
from arealite.api.run_folder import RunFolder
from arealite.api.script import refuse_import
from arealite.api.workflow_api import RolloutWorkflow
from arealite.inference.backends import BACKENDS, Backend
from arealite.inference.colocated import ColocatedServer
from arealite.inference.completions import Completions
from arealite.inference.discovery import Membership, named_servers, open_registry
from arealite.inference.http import open_session
from arealite.inference.pool import PoolView, ServerPool
from arealite.inference.weight_update import WeightReceiver
from arealite.rollout.account.store import Replay, is_stored, updates_of
from arealite.rollout.collective import RankZeroExchange
from arealite.rollout.episode import Attempts
from arealite.rollout.evaluation import evaluation_metrics
from arealite.rollout.event_loop import EventLoopThread, activity
from arealite.rollout.executor import RolloutExecutor
from arealite.rollout.prompts import Dataloader, Episode, ShouldAccept
from arealite.rollout.trajectory import assemble_batch, split_batch
from arealite.utils import heartbeat, trace
from arealite.utils.background import BackgroundTasks
from arealite.utils.distributed import global_rank
from arealite.utils.packed import join, unpack
from arealite.utils.processes import QuietCollector, raise_file_limit
from arealite.utils.secret import ensure_secret, secret_of_environment

T = TypeVar("T")
logger = logging.getLogger("arealite.client")


@dataclass(frozen=True)
class ClientView:
    """What clients in other processes must know of this one: versions, servers, and whether requests may go out."""

    version: int
    backend: Backend  # knows what each server supports
    servers: PoolView
    may_generate: bool
    update_timeout_s: float


class OtherClients(Attempts, Protocol):
    """Clients in other processes, which run episodes for this one."""

    async def start(self, view: ClientView, secret: str | None, completions: Completions) -> None:
        """Be ready to run; `completions` is told of tokens that they sampled, and of servers without weights."""

    async def show(self, view: ClientView) -> None:
        """Return when every client obeys the view."""

    def note_checkpoint(self) -> None:
        """Forget how often clients were lost: the run would resume from here."""

    def write(self, path: Path, tables: list[Any], trained_step: int | None) -> None:
        """Write the file of a batch, whose tables the clients have."""


@dataclass(frozen=True)
class Surroundings:
    """What is outside of the client: the loop it lives in, the connections and the servers. A simulation has others."""

    make_loop: Callable[..., EventLoopThread] = EventLoopThread
    open_session: Callable[[str | None], aiohttp.ClientSession] = open_session
    named_servers: Callable[[InferenceEngineConfig, str | None], list[str]] = named_servers
    open_registry: Callable[[InferenceEngineConfig, str | None], Coroutine[Any, Any, Any]] = open_registry


class Published(Protocol):
    """The weights that were published last, and their sender; see `weights.publish.Publication`."""

    def update_joining(self) -> None:
        """Give them to servers that joined since (collective)."""


class RemoteInferenceEngine(InferenceEngine):
    """Samples from servers of the kind that `rollout.backend` names, over HTTP, and runs episodes on top of that."""

    protocol: type[Any] = Backend  # what the servers must speak

    def __init__(
        self,
        config: InferenceEngineConfig,
        *,
        hand_out: Callable[[list[TensorDict]], Any] = assemble_batch,
        clients: OtherClients | None = None,
        surroundings: Surroundings = Surroundings(),
    ) -> None:
        """`hand_out` makes of trajectories the batch of a loop with one rank: a master of Core puts them into Ray's
        store. `clients` run training episodes in other processes, and need one that takes `Record`s; evaluations run
        here."""
        refuse_import()
        backend = BACKENDS[config.backend]
        if not issubclass(backend, self.protocol):
            fitting = [name for name, other in BACKENDS.items() if issubclass(other, self.protocol)]
            raise ConfigError(
                f"rollout.backend must be {' or '.join(fitting)} for {type(self).__name__}: got {config.backend}. "
                "Change allocation_mode, or construct a RemoteInferenceEngine, which takes any."
            )
        self.config = config
        self.servers = ServerPool(clock=self.now)
        accepts_mismatch = config.weight_check.on_mismatch == "warn"
        self._backend = backend(pause_mode=config.pause_mode, accepts_mismatch=accepts_mismatch)
        self._hand_out, self._clients, self._surroundings = hand_out, clients, surroundings
        self._version = 0
        self._executor: RolloutExecutor | None = None
        self._completions: Completions
        self.receiver: WeightReceiver  # both exist as long as the executor
        self.colocated: ColocatedServer | None = None  # in this process, on the actor's parameters
        self._membership: Membership | None = None  # None for `server_addrs`, which never change
        self.published: Published | None = None  # set by `publish_weights`
        self._rate_from = (0.0, 0)  # when `metrics` was last called, and how many tokens had been sampled
        self._replay: Replay | None = None
        self._training: Any = None  # this rank's share of the batch that is trained on, or a master's batch
        self._exchange = RankZeroExchange(config.parallel)
        self._showing = BackgroundTasks("showing the servers to other clients", logger)
        self.canary_gap: float | None = None  # largest one per token, of servers' and trainer's logprobs, last update

    # Life cycle

    def initialize(self, addr: str | None, ft_spec: FinetuneSpec | None) -> None:
        """Start the runtime, once the servers that `addr`, config or environment name, or that register, are ready."""
        if global_rank() != 0:
            return
        if self.config.replay_from:
            self._replay = Replay(self.config.replay_from, self, list)
            return
        addresses = self._surroundings.named_servers(self.config, addr)
        raise_file_limit()
        self._collector = QuietCollector()
        self._executor = RolloutExecutor(self.config, self, self._clients, self._surroundings.make_loop, list)
        self._rate_from = (self.now(), 0)
        self._executor.catch_up = self._catch_up
        self._executor.are_servers_full = lambda: bool(self._completions.num_waiting)
        if self._clients is not None:
            self._executor.store.write_there = self._clients.write
        try:
            secret = self._secret_of_run(is_ours=not addresses)
            if self.config.colocated is not None:
                addresses = [self._start_colocated(self.config.colocated, secret)]
            self._executor.loop.run(self._connect(addresses, secret))
        except BaseException:
            self.destroy()
            raise

    def destroy(self) -> None:
        if self._executor is None:
            return
        self.servers.on_change = None
        try:
            self._executor.close()
        finally:
            self._executor = None
            if self.colocated is not None:
                self.colocated.close()

    def _secret_of_run(self, *, is_ours: bool) -> str | None:
        """Return what servers want to be shown; those of this run have a secret, which no launcher may have made."""
        if not (self.config.fileroot and is_ours):
            return secret_of_environment()
        folder = RunFolder(self.config).path
        folder.mkdir(parents=True, exist_ok=True)
        return ensure_secret(folder)

    def _start_colocated(self, config: ColocatedConfig, secret: str | None) -> str:
        """Start the server of this process and return its address; its end wakes the thread that waits for a batch."""
        allow_stale_kv, executor = self.config.pause_mode == "in_place", self._require_executor()
        self.colocated = ColocatedServer(config, allow_stale_kv=allow_stale_kv, seed=self.config.seed, secret=secret)
        self.colocated.stopped.add_done_callback(lambda _: executor.ask_to_catch_up())
        return self.colocated.address

    async def _connect(self, addresses: list[str], secret: str | None) -> None:
        loop, completions = self._require_executor().loop, self._open(secret)
        if self._clients is not None:
            completions.on_hold = self._show
            await self._clients.start(self._view(), secret, completions)
        if addresses:
            await completions.connect(addresses)
        else:
            registry = await self._surroundings.open_registry(self.config, secret)
            loop.closers.append(registry.close)
            self._membership = Membership(completions, registry)
            await self._membership.wait_for(self.config.num_servers)
        await completions.load_vocabulary()
        heartbeat.report("servers", lambda: {one.address: one.outstanding_tokens for one in self.servers.servers})
        self.servers.begin(self._version)

    def _open(self, secret: str | None) -> Completions:
        """Make the client itself, which has no servers yet (in the loop)."""
        loop, session = self._require_executor().loop, self._surroundings.open_session(secret)
        loop.closers.append(session.close)
        self._completions = Completions(self.config, self._backend, self.servers, session)
        self.receiver = WeightReceiver(self._completions)
        self.servers.on_change = lambda: loop.call_soon(self._note_change)
        return self._completions

    def _view(self) -> ClientView:
        completions = self._completions
        may_generate = completions.may_generate.is_set()
        return ClientView(self._version, self._backend, self.servers.view(), may_generate, completions.update_timeout_s)

    async def _show(self) -> None:
        """Let other clients know the servers, and wait until they do: none may pause or resume before."""
        if self._clients is not None:
            await self._clients.show(self._view())

    def _note_change(self) -> None:
        """Wake waiting requests, adjust the concurrency, and let the thread that waits for a batch call `_catch_up`."""
        if self._executor is None:
            return
        self._completions.note_change()
        if self._clients is not None:
            self._showing.start(self._show())
        if self._membership is not None:
            self._executor.set_capacity(len(self.servers.serving) / self.config.num_servers)
        if self.servers.joining:
            self._executor.ask_to_catch_up()

    def _catch_up(self) -> None:
        """Update joining servers while the trainer waits (rank 0, in the trainer's thread). Raises ServerError if the
        server of this process has ended."""
        if self.colocated is not None:
            self.colocated.check()
        if self.published is not None and self.servers.joining:
            self._exchange.run_on_every_rank(self._update_joining)

    def _update_joining(self) -> None:
        """Give joining servers the published weights (collective)."""
        if self.published is not None:
            self.published.update_joining()

    # Generation

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        if req.gconfig.n_samples != 1:
            raise ValueError(
                f"gconfig.n_samples must be 1 in a request: got {req.gconfig.n_samples}. "
                "Send one request per sample with gconfig.new(n_samples=1)."
            )
        if not req.input_ids:
            raise ValueError("input_ids must have at least one token: got none. Send a prompt.")
        if req.gconfig.stop and not self.config.tokenizer_path:
            raise ValueError(
                f"rollout.tokenizer_path must be set for stop strings: got none for {req.gconfig.stop}. "
                "Set it to the model's path."
            )
        executor = self._require_executor()
        if asyncio.get_running_loop() is not executor.loop.loop:
            return await asyncio.wrap_future(executor.loop.submit(self._completions.generate(req)))
        with trace.phase("servers"):
            return await self._completions.generate(req)

    # Weights and versions

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        """Start the receiving half of a weight update, with a new `meta.transfer` for the sending half.
        Raises WeightUpdateError if the servers can't be paused."""
        loop = self._require_executor().loop
        if not meta.only_joining:
            self.published = None  # older weights
        version = meta.version
        if version is None or version == meta.transfer.version:
            version = self.get_version() + 1
        meta.transfer = WeightTransfer(version, is_shared=self.colocated is not None, shares=self.colocated)
        if self.config.servers_sleep and meta.type != "disk":
            raise ConfigError(
                f"servers on the trainer's devices must get weights by disk: got {meta.type}, and NCCL refuses "
                "two ranks on one GPU. Use WeightUpdateMeta.from_disk, or '+' in allocation_mode."
            )
        loop.run(self.receiver.begin(meta))
        return loop.submit(trace.awaited("servers take weights", self.receiver.receive(), version=version))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of `receiver` in the event loop (rank 0)."""
        return self._require_executor().loop.run(coroutine)

    def set_version(self, version: int) -> None:
        self._version = version
        if self._executor is not None:
            self._executor.set_version(version)
            self._collector.collect()

    def get_version(self) -> int:
        return self._version

    # Episodes

    def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        (self._replay or self._require_executor()).submit(data, workflow)

    def wait(self, count: int, timeout: float | None = None, should_accept: ShouldAccept | None = None) -> TensorDict:
        return self._rollouts().wait(count, timeout, should_accept)

    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> TensorDict:
        return self._share(lambda: self._rollouts().run_all(data, workflow))

    def prepare_batch(
        self, dataloader: Dataloader, workflow: RolloutWorkflow, should_accept: ShouldAccept | None = None
    ) -> TensorDict:
        @activity.waiting(lambda: self.servers.num_slots)
        def collect() -> list[TensorDict]:
            return self._rollouts().prepare_batch(dataloader, workflow, should_accept)

        return self._share(collect)

    def _share(self, collect: Callable[[], list[TensorDict]]) -> Any:
        """Return this rank's share of the trajectories that rank 0 collects, or what `hand_out` makes of all."""

        def split(trajectories: list[TensorDict], num_parts: int) -> Iterable[Any]:
            self.sleep()  # before any rank computes
            if self._exchange.num_ranks == 1:
                return [self._hand_out(trajectories)]
            return split_batch(trajectories, num_parts, self.config.num_minibatches)

        share = self._exchange.share(collect, split, self._update_joining)
        self._training = share if self._exchange.num_ranks == 1 else unpack(join(share))
        return self._training

    def record_update(self, actor: Any) -> None:
        """Store what an actor computed per token of the last batch (collective)."""
        batch, self._training = self._training, None
        is_wanted = batch is not None and is_stored(self.config)
        if is_wanted and (updates := updates_of(actor, batch, self._exchange.gather)):
            self._require_executor().store.append_update(updates)

    def evaluate_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> dict[str, float]:
        """Run one episode per item of rank 0's `data` now and return what `evaluation_metrics` makes of them."""

        def evaluate() -> dict[str, float]:
            return evaluation_metrics(self._rollouts().run_all(data, workflow, is_evaluation=True), len(data))

        return self._exchange.share(evaluate, lambda means, num_ranks: [means] * num_ranks, self._update_joining)

    def evaluate_each(
        self, data: Sequence[dict[str, Any]], workflow: RolloutWorkflow, keep: Callable[[Episode], None]
    ) -> None:
        """Run one episode per item now and hand each accepted one to `keep` (in the event loop) as soon as it ends.

        The caller judges that one version of the weights has sampled them all.
        """
        self._require_executor().evaluate_each(data, workflow, keep)

    def _rollouts(self) -> RolloutExecutor | Replay:
        """Return what yields trajectories, to a caller that waits for them."""
        are_asleep = self._executor is not None and self._completions.are_asleep
        if are_asleep or not (self.colocated is None or self.colocated.is_current):
            raise RuntimeError(
                "weights must be published before anything is sampled from them: got a call between an update and its "
                "publication, in which a server on the trainer's device stands still. Call publish_weights first, or "
                "give servers devices of their own by '+' in allocation_mode."
            )
        return self._replay or self._require_executor()

    def sleep(self) -> None:
        """Let servers on the trainer's devices give their memory back until weights are published; completions in
        flight wait. `prepare_batch` and `rollout_batch` do it, a script that trains on what `wait` returns has to."""
        if self.config.servers_sleep and self._executor is not None:
            self._executor.loop.run(self._completions.sleep())

    def pause(self) -> None:
        """Start no new episodes; running ones continue."""
        if self._executor is not None:
            self._executor.pause()

    def resume(self) -> None:
        """Start episodes again, and release requests that a weight update holds."""
        if self._executor is not None:
            self._executor.loop.run(self.receiver.release())
            self._executor.resume()

    def state_dict(self) -> dict[str, Any]:
        """Make what became of all prompts durable, and return what `load_state_dict` needs; empty except on rank 0."""
        if self._executor is None:
            return {}
        done = self._completions
        counts = {"generated_tokens": done.num_tokens, "stale_kv_tokens": done.num_stale_kv_tokens}
        return self._executor.state_dict() | counts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint, before the first episode; `prepare_batch` issues again what was open then."""
        if self._executor is not None:
            self._executor.load_state_dict(state)
            self._completions.num_tokens = state["generated_tokens"]
            self._rate_from = (self.now(), self._completions.num_tokens)
            self._completions.num_stale_kv_tokens = state["stale_kv_tokens"]

    def note_checkpoint(self, step: int, position: int) -> None:
        """Record that a published checkpoint holds the updates up to a step and the ledger up to a position."""
        if self._executor is not None:
            self._executor.note_checkpoint(step, position)
            if self._clients is not None:
                self._clients.note_checkpoint()

    @property
    def stats(self) -> RolloutStat:
        """Counts of episodes since the run began (rank 0)."""
        return self._require_executor().stats

    def metrics(self) -> dict[str, float]:
        """Return counts by metric name, and the rate of generation since the last call; empty on other ranks than 0."""
        if self._executor is None:
            return {}
        (began, num_before), read = self._rate_from, (self.now(), self._completions.num_tokens)
        self._rate_from, membership = read, self._membership
        held_s, self._completions.held_s = self._completions.held_s, 0.0
        num_bytes, self.receiver.num_bytes = self.receiver.num_bytes, 0
        waits = {f"wait/{kind}_s": seconds for kind, seconds in activity.take_waits().items()}
        metrics = (
            self._executor.metrics()
            | waits
            | {
                "servers/live": float(len(self.servers.serving)),
                "servers/joined": float(membership.num_joined if membership else 0),
                "servers/left": float(membership.num_left if membership else 0),
                "perf/generated_tokens_per_s": max(0, read[1] - num_before) / max(1e-3, read[0] - began),
                "rollout/generated_tokens": float(self._completions.num_tokens),
                "rollout/stale_kv_tokens": float(self._completions.num_stale_kv_tokens),
                "weights/pause_s": held_s,
                "weights/sent_mib": num_bytes / 2**20,
                "weights/mismatched_tensors": float(self.receiver.num_mismatched),
            }
        )
        return metrics if self.canary_gap is None else metrics | {"policy/canary_gap": self.canary_gap}

    def now(self) -> float:
        """Return the time of the event loop, from any thread; 0 without one."""
        return 0.0 if self._executor is None else self._executor.loop.loop.time()

    def _require_executor(self) -> RolloutExecutor:
        if self._executor is None:
            raise RuntimeError(
                f"the inference engine must be initialized, and used on rank 0: got rank {global_rank()}. "
                "Call initialize first; on other ranks only the collective methods work."
            )
        return self._executor
