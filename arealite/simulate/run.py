"""A run in virtual time: the production client, account, pool, health and publication on simulated servers."""

import asyncio
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from tensordict import TensorDict
from torch._C._distributed_c10d import HashStore

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.config.rollout import WeightCheckConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import AReaLiteError
from arealite.api.io_struct import ModelRequest, ParamSpec, WeightUpdateMeta
from arealite.api.workflow_api import RolloutWorkflow
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.registry import Registry, ServerEntry
from arealite.inference.remote_engine import RemoteInferenceEngine, Surroundings
from arealite.planner.scenario import Scenario
from arealite.rollout.event_loop import activity
from arealite.rollout.prompts import Dataloader
from arealite.simulate.servers import SimulatedServer, SimulatedSession
from arealite.simulate.virtual import VirtualLoop, VirtualLoopThread
from arealite.weights.publish import publish_weights
from arealite.workflow.trajectory import sample_group, trajectory_from_response

PARTS = ("rollout", "train", "weights")  # of a step
_LEASE_S, _SLOW_SPEED = 30.0, 0.25  # until a server that died leaves the list; of a slow one


@dataclass
class Result:
    """What came of the measured steps."""

    moments: list[tuple[float, float, float, float]] = field(default_factory=list)  # of each: begun, sampled, ...
    servers: list[list[list[float]]] = field(default_factory=list)  # in each: how busy, and mean sequences, of each
    staleness: Counter[int] = field(default_factory=Counter)  # of the trained tokens
    num_trained: int = 0  # tokens, prompts included
    num_calls: int = 0
    deaths: list[tuple[float, int]] = field(default_factory=list)  # time, and number of the server
    failure: AReaLiteError | None = None

    @property
    def step_s(self) -> list[float]:
        return [ended - began for began, *_, ended in self.moments]

    @property
    def seconds(self) -> float:
        return self.moments[-1][-1] - self.moments[0][0] if self.moments else 0.0

    @property
    def spent_s(self) -> dict[str, float]:
        return dict(zip(PARTS, np.diff(self.moments).sum(0).tolist(), strict=True))

    @property
    def mean_staleness(self) -> float:
        return sum(version * count for version, count in self.staleness.items()) / max(1, self.staleness.total())


class _Actor:
    """What `publish_weights` needs of an actor."""

    num_threads, num_changes, frozen_weights, transfer_group = 1, 0, None, None

    def __init__(self, scenario: Scenario) -> None:
        shape = (max(1, int(scenario.weight_bytes / 2 / scenario.num_buckets)),)
        self._buckets = [[ParamSpec(f"w{index}", shape, "bfloat16")] for index in range(scenario.num_buckets)]

    def get_param_specs(self, num_senders: int | None = 1) -> list[list[ParamSpec]]:
        return self._buckets

    def meeting_point(self, toward: str) -> tuple[str, int, bool]:
        return toward, 1, True

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        meta.transfer.uploaded.set_result(None)

    def set_version(self, version: int) -> None:
        pass


class _Workflow(RolloutWorkflow):
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._gconfig = GenerationHyperparameters(n_samples=1, max_new_tokens=scenario.max_new_tokens)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict:
        ids = data["input_ids"]

        async def run(sample: int) -> TensorDict:
            length = self._scenario.lengths(1000 * ids[0] + ids[1], sample)
            gconfig = self._gconfig.new(min_new_tokens=length, max_new_tokens=length)
            response = await engine.agenerate(ModelRequest(ids, gconfig))
            if self._scenario.reward_s:
                await asyncio.sleep(self._scenario.reward_s)
            return trajectory_from_response(response, float(sample % 2))

        return await sample_group(run, self._scenario.group)


def _batches(scenario: Scenario) -> Iterator[list[dict[str, Any]]]:
    """Yield batches of made-up prompts without end."""
    for first in itertools.count(0, scenario.batch_size):
        numbers, rest = range(first, first + scenario.batch_size), [5] * scenario.prompt
        yield [{"input_ids": [n // 1000, n % 1000, 1, 2, *rest][: scenario.prompt]} for n in numbers]


class Simulation:
    """The run of a scenario, in a loop of its own."""

    def __init__(self, scenario: Scenario, on_step: Callable[[int], None] = lambda step: None) -> None:
        """`on_step` is called at the end of each step, to plan what happens to servers in the next."""
        self._has_group = not dist.is_initialized()
        if self._has_group:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        self.scenario, self.loop, self.on_step = scenario, VirtualLoop(), on_step
        self.draw, self.first_step = random.Random(scenario.seed), 0
        self.prompts: Dataloader = _batches(scenario)
        self.servers: dict[str, SimulatedServer] = {}
        for address in (f"s{number}:1" for number in range(scenario.num_servers)):
            speed = _SLOW_SPEED if self.draw.random() < scenario.slow_share else 1.0
            self.servers[address] = SimulatedServer(address, scenario.server, self.loop, speed)
        self.session, self.result = SimulatedSession(self.servers), Result()
        self.rollout = RemoteInferenceEngine(self._config(), surroundings=self._surroundings())

    def _config(self) -> InferenceEngineConfig:
        scenario = self.scenario
        return InferenceEngineConfig(
            experiment_name="simulated",
            trial_name="simulated",
            backend="sglang",
            num_servers=scenario.num_servers,
            consumer_batch_size=scenario.batch_size,
            max_concurrent_rollouts=scenario.concurrency,
            max_head_offpolicyness=scenario.bound,
            weight_update="broadcast",
            weight_check=WeightCheckConfig(fingerprint=False, canary_tokens=0),
            **{"episode_timeout": 36000.0, "request_timeout": 36000.0, "setup_timeout": 3600.0, **scenario.rollout},
        )

    def _surroundings(self) -> Surroundings:
        async def open_registry(config: InferenceEngineConfig, secret: str | None) -> Registry:
            self.registry = Registry(None)
            for address in self.servers:
                await self.register(address)
            return self.registry

        return Surroundings(
            make_loop=lambda *_, **__: cast("Any", VirtualLoopThread(self.loop)),
            open_session=lambda secret: cast("Any", self.session),
            named_servers=lambda config, addr: [],
            open_registry=open_registry,
        )

    async def register(self, address: str) -> None:
        """List a server, as a new life of it."""
        name = address.partition(":")[0]
        await self.registry.put(ServerEntry(name, address, "sglang", f"{name}-{self.loop.time():.0f}"))

    def run(self) -> Result:
        """Train for the scenario's steps, and return what came of those after the warm-up."""
        activity.clock = self.loop.time
        try:
            self.rollout.initialize(None, None)
            self._train()
        except AReaLiteError as error:
            self.result.failure = error
        finally:
            self.rollout.destroy()
            self.loop.close()
            activity.clock = time.monotonic
            if self._has_group:
                dist.destroy_process_group()
        return self.result

    def _train(self) -> None:
        scenario, rollout = self.scenario, self.rollout
        thread, actor = VirtualLoopThread(self.loop), cast("FSDPPPOActor", _Actor(scenario))
        workflow, draw = _Workflow(scenario), random.Random(scenario.seed)
        accept = (lambda _: draw.random() >= scenario.rejected_share) if scenario.rejected_share else None
        publish_weights(actor, rollout, version=self.first_step)
        if scenario.mean_life_s < math.inf:
            thread.submit(self._let_servers_die())
        num_calls, before = 0, self._server_seconds()
        for step in range(self.first_step, scenario.warm_up + scenario.steps):
            if step == scenario.warm_up:
                self.result, num_calls = Result(), self.session.num_calls
            result, began = self.result, self.loop.time()
            batch = rollout.prepare_batch(self.prompts, workflow, accept)
            sampled = self.loop.time()
            num_tokens = int(batch["attention_mask"].sum())
            thread.run(asyncio.sleep(scenario.train_s + scenario.train_token_s * num_tokens))
            trained = self.loop.time()
            thread.run(asyncio.sleep(scenario.publish_s))
            publish_weights(actor, rollout, version=step + 1)
            ended, after = self.loop.time(), self._server_seconds()
            result.moments.append((began, sampled, trained, ended))
            result.servers.append(((after - before) / (ended - began)).tolist())
            result.num_trained += num_tokens
            result.num_calls = self.session.num_calls - num_calls
            result.staleness.update((step - batch["versions"])[batch["loss_mask"].bool()].tolist())
            before = after
            self.on_step(step)

    def _server_seconds(self) -> Any:
        """Return of each server the seconds in which it computed, and the sum of those of its sequences."""
        return np.array([(server.busy_s, server.slot_s) for server in self.servers.values()])

    async def _let_servers_die(self) -> None:
        """Let servers die independently of each other, and register anew after a restart."""
        scenario, servers = self.scenario, list(self.servers.values())
        while True:
            await asyncio.sleep(self.draw.expovariate(len(servers) / scenario.mean_life_s))
            server = servers[self.draw.randrange(len(servers))]
            if not server.is_dead:
                server.die(hangs=self.draw.random() < scenario.hang_share)
                self.result.deaths.append((self.loop.time(), servers.index(server)))
                self.loop.create_task(self._bring_back(server))

    async def _bring_back(self, server: SimulatedServer) -> None:
        await asyncio.sleep(_LEASE_S)
        self.registry.remove_named(server.address.partition(":")[0])
        await asyncio.sleep(self.scenario.restart_s)
        server.restart()
        await self.register(server.address)


def simulate(scenario: Scenario) -> Result:
    """Run a scenario in virtual time. Deterministic."""
    return Simulation(scenario).run()
