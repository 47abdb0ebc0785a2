"""What a master and its groups of workers cost: per step, per byte, per token and per rank. On CPUs, on one node.

    python benchmarks/core.py [--case step] [--rounds 7] [--json] [--out benchmarks/results/core.jsonl]

`step`: one step of GRPO with a reference on a tiny model, 2,048 made-up samples of 16 + 16 tokens on average, in turn
on engines of this process (a script of ranks), on a worker by the script's three changed lines, and by a graph. It is
what the script does between a batch and the next: logprobs, the reference's, advantages, update, and the new version;
no servers and no transfer of weights, which are the same code. The smaller the model, the larger is Core's part. CPU,
which other work on the cores disturbs less than seconds, is of this process and the worker.
`overlap`: three calls that wait 1 s each on three groups.
`data`: scatter, a call that returns one of its columns, and fetch, against put, an actor that returns a copy, and get
with a copy, of one numpy array of as many bytes.
`account`: CPU time of the master per sampled token, of episodes of 512 canned tokens from a real HTTP server, with
ledger and rollout files, scattered to a worker that infers and trains nothing.
`episodes`: the same episodes, of 8 samples, scattered, in the master and on a rollout worker. On two cores, which a
server shares, workers are no quicker; what the master computes for an episode says how many it could take if they had
their own.
`scale`: groups of workers that do no arithmetic, only wait for given times: the share of a step for which the master
computes. On two cores its workers need longer than they were told, so the share is of the time that they were told.
For 1,000 ranks, the CPU time of the master is taken to grow with their number, at the same calls of a step and samples
of a rank.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from circumstances import options, report
from model_configs import write_tiny
from pydantic import create_model
from runtime_overhead import PROMPT_TOKENS, OneRequest, served
from tensordict import TensorDict

from arealite.api.cli_args import (
    ClusterSpecConfig,
    GRPOConfig,
    InferenceEngineConfig,
    RoleConfig,
    TrainEngineConfig,
    WorkersConfig,
    load_expr_config,
)
from arealite.api.config.run import RunConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import FinetuneSpec
from arealite.core.batch import Column, RemoteBatch
from arealite.core.experiments import grpo
from arealite.core.master import Master
from arealite.core.records import overlap
from arealite.core.remote_engine import RemoteEngine
from arealite.core.workers import Workers
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.tensors import concat_padded_tensors

CONFIG = Path(__file__).parents[1] / "examples" / "arealite" / "configs" / "gsm8k_grpo_cpu.yaml"
TOKENS = ("input_ids", "attention_mask")
SAMPLES, GROUP = 2048, 8
MIB = 2**20


def main() -> None:
    """Measure every case and print one line each."""
    parser = options(__doc__)
    parser.add_argument("--case", choices=CASES, help="only this one")
    parser.add_argument("--rounds", type=int, default=7, help="of every case, after a first one that warms up")
    parser.add_argument("--tokens", type=int, default=512, help="of a sample of `episodes`")
    parser.add_argument("--roles", type=int, default=8, help="groups of `scale`")
    parser.add_argument("--ranks", type=int, default=8, help="of each group of `scale`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, (measure, line) in CASES.items():
        if args.case not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = {"case": name, "rounds": args.rounds} | measure(args, folder)
        report(args, result, f"{{case:8}} {line} (load {{load}})".format_map)


# A step


def measure_step(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return seconds of a step of each kind, medians of alternating rounds."""
    write_tiny(f"{folder}/model")
    given = [f"actor.path={folder}/model", f"cluster.fileroot={folder}", "workers={}", "ref={}"]
    given += ["actor.kl_ctl=0.01", "actor.proximal=recompute"]
    given += [f"gconfig.n_samples={GROUP}", "launcher.trainer_threads=1"]
    config = load_expr_config(["--config", str(CONFIG), *given], GRPOConfig)[0]
    ft_spec = FinetuneSpec(1, 1000, 10)
    batch = samples(SAMPLES, prompt=16, completion=16)
    with Workers(config) as workers:
        here: list[Any] = [FSDPPPOActor(getattr(config, role)) for role in ("actor", "ref")]
        there: list[Any] = [workers.engine(role, FSDPPPOActor, getattr(config, role)) for role in ("actor", "ref")]
        for actor, ref in (here, there):
            actor.initialize(None, ft_spec)
            ref.initialize(None, ft_spec, policy=actor)
        master = Master(config, grpo(config))
        master.workers, master.engines = workers, dict(zip(("actor", "ref"), there))
        kinds: dict[str, Callable[[], Any]] = {
            "script": lambda: visible_step(here, batch.clone()),
            "migrated": lambda: visible_step(there, workers.scatter(batch)),
            "graph": lambda: master.run_graph(workers.scatter(batch)),
        }
        worker = psutil.Process(there[0].call(_pid, batch))
        found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
        for version in range(args.rounds + 1):
            for kind, run in kinds.items():
                engine = here[0] if kind == "script" else there[0]
                began = time.perf_counter(), time.process_time(), _cpu_s(worker)
                run()
                engine.set_version(version + 1)
                ended = time.perf_counter(), time.process_time(), _cpu_s(worker)
                wall_s, own_s, other_s = (after - before for before, after in zip(began, ended))
                found[kind].append((wall_s, own_s, own_s + other_s))
        for engine in here:
            engine.destroy()
    medians = {kind: [statistics.median(column) for column in zip(*rows[1:])] for kind, rows in found.items()}
    script = medians["script"]
    result: dict[str, Any] = {"samples": SAMPLES, "tokens": int(batch["attention_mask"].sum())}
    for kind, (wall_s, master_cpu_s, cpu_s) in medians.items():
        result |= {f"{kind}_s": wall_s, f"{kind}_cpu_s": cpu_s}
        if kind != "script":
            result |= {f"{kind}_ratio": wall_s / script[0], f"{kind}_cpu_ratio": cpu_s / script[2]}
            result |= {f"{kind}_master_cpu_s": master_cpu_s}
    return result


def visible_step(engines: Sequence[Any], batch: Any) -> None:
    """Do what `gsm8k_grpo.py` does with a batch, wherever its actor and reference are."""
    actor, ref = engines
    batch["proximal_logprobs"] = actor.compute_logprobs(batch)
    batch["ref_logprobs"] = ref.compute_logprobs(batch)
    actor.compute_advantages(batch)
    actor.ppo_update(batch)


def samples(num_rows: int, *, prompt: int, completion: int) -> TensorDict:
    """Return a batch as episodes of random tokens make it, with completions of half to one and a half the length."""
    draw = torch.Generator().manual_seed(0)
    width = prompt + completion * 3 // 2
    lengths = prompt + torch.randint(completion // 2, completion * 3 // 2 + 1, (num_rows, 1), generator=draw)
    place = torch.arange(width).expand(num_rows, width)
    real = place < lengths
    sampled = real & (place >= prompt)
    columns = {
        "input_ids": torch.randint(5, 400, (num_rows, width), generator=draw).int() * real,
        "attention_mask": real,
        "loss_mask": sampled,
        "logprobs": torch.full((num_rows, width), -6.0) * sampled,
        "versions": torch.where(sampled, 0, -1).int(),
        "rewards": torch.rand(num_rows, generator=draw),
        "group_index": torch.arange(num_rows) // GROUP,
    }
    return TensorDict(columns, batch_size=[num_rows])


def _pid(engine: object, batch: object) -> int:
    return os.getpid()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# Engines without arithmetic


class Waiter:
    """An engine that waits for as long as it is told."""

    model_config = None

    def __init__(self, config: object) -> None:
        self.config = config

    def initialize(self, addr: None, ft_spec: None) -> None:
        """There is nothing to load."""

    def set_version(self, version: int) -> None:
        """There are no weights."""

    def infer(self, batch: TensorDict, *, seconds: float = 0.0) -> Any:
        """Return a column."""
        time.sleep(seconds)
        return batch["attention_mask"].float()

    def echo(self, batch: TensorDict) -> Any:
        """Return a column as it is."""
        return batch["payload"]

    def train(self, batch: TensorDict, *, seconds: float = 0.0) -> dict[str, float]:
        """Return metrics."""
        time.sleep(seconds)
        return {"train/loss": 0.0}


@contextmanager
def waiters(folder: str, num_roles: int, num_ranks: int) -> Iterator[tuple[Workers, list[RemoteEngine]]]:
    """Start groups with an engine each."""
    roles = [f"role{number}" for number in range(num_roles)]
    wishes: dict[str, Any] = {role: (RoleConfig, RoleConfig()) for role in roles}
    kind = create_model("Roles", __base__=WorkersConfig, **wishes)
    config = RunConfig(
        experiment_name="benchmark",
        trial_name="core",
        cluster=ClusterSpecConfig(n_gpus_per_node=0, fileroot=folder),
        model=TrainEngineConfig(path="none"),
        workers=kind(**{role: RoleConfig(ranks=num_ranks, threads=1) for role in roles}),
    )
    with Workers(config) as workers:
        engines: list[Any] = [workers.engine(role, Waiter, None) for role in roles]
        for engine in engines:
            engine.initialize(None, None)
        yield workers, engines


def step_of_waiters(
    batch: Any, engines: list[RemoteEngine], *, infer_s: float = 0.0, train_s: float = 0.0, version: int = 0
) -> None:
    """Let every group infer, and then every group train on what all have inferred."""
    for engine in engines:
        batch[engine.role] = engine.call("infer", batch, output="inferred", keys=TOKENS, seconds=infer_s)
    tasks = [engine.submit("train", batch, kwargs={"seconds": train_s}) for engine in engines]
    for engine, task in zip(engines, tasks):
        engine.wait(task)
    engines[0].set_version(version + 1)


# Overlap


def measure_overlap(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return the wall time of three calls that wait a second each."""
    seconds, overlaps = [], []
    with waiters(folder, 3, 1) as (workers, engines):
        for _ in range(args.rounds + 1):
            batch = workers.scatter(samples(64, prompt=16, completion=16))
            workers.take_records()
            began = time.perf_counter()
            columns = [engine.call("infer", batch, output="inferred", keys=TOKENS, seconds=1.0) for engine in engines]
            for column in columns:
                column.pieces.result()
            seconds.append(time.perf_counter() - began)
            overlaps.append(overlap(workers.take_records()))
    return {"wall_s": statistics.median(seconds[1:]), "overlap": statistics.median(overlaps[1:])}


# Data


def measure_data(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return MiB per second of the data plane and of Ray itself, medians of alternating rounds."""
    tensors = samples(1024, prompt=1024, completion=2048).select(*TOKENS)
    tensors["payload"] = torch.rand(*tensors["input_ids"].shape, dtype=torch.float64) * tensors["attention_mask"]
    num_bytes = int(tensors["attention_mask"].sum()) * 8
    array = np.ones(num_bytes, dtype=np.uint8)
    whole_bytes = num_bytes + num_bytes // 2 + tensors["attention_mask"].nbytes  # int32 ids too
    whole = np.ones(whole_bytes, dtype=np.uint8)
    found: dict[str, list[float]] = {}

    def timed(name: str, size: int, run: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        value = run(*args)
        found.setdefault(name, []).append(size / MIB / (time.perf_counter() - began))
        return value

    with waiters(folder, 1, 1) as (workers, (engine,)):
        actor = ray.remote(Echo).remote()
        ended(engine, workers.scatter(tensors))
        for _ in range(args.rounds + 1):
            batch = timed("scatter", whole_bytes, workers.scatter, tensors)
            column = timed("call", 2 * num_bytes, ended, engine, batch)
            same = timed("fetch", num_bytes, workers.fetch, column, batch)
            assert torch.equal(same, tensors["payload"]), "what comes back is what was sent"
            timed("put", whole_bytes, ray.put, whole)
            back = timed("actor", 2 * num_bytes, echoed, actor, ray.put(array))
            timed("get", num_bytes, lambda reference: np.array(ray.get(reference)), back)
    rates = {f"{name}_mib_per_s": statistics.median(values[1:]) for name, values in found.items()}
    ratios = {
        f"{ours}_ratio": rates[f"{ours}_mib_per_s"] / rates[f"{rays}_mib_per_s"]
        for ours, rays in (("scatter", "put"), ("call", "actor"), ("fetch", "get"))
    }
    return {"mib": num_bytes / MIB, **rates, **ratios}


def ended(engine: RemoteEngine, batch: RemoteBatch) -> Column:
    """Return a column that exists and equals another one."""
    column: Column = engine.call("echo", batch, output="same", keys=("attention_mask", "payload"))
    column.pieces.result()
    return column


def echoed(actor: Any, reference: Any) -> Any:
    """Return a reference to a copy that exists."""
    ready, _ = ray.wait([actor.echo.remote(reference)], fetch_local=False)
    return ready[0]


class Echo:
    """An actor that returns a copy of what it gets."""

    def echo(self, array: Any) -> Any:
        return np.array(array)


# The account of episodes


class LongRequest(OneRequest):
    """One request of many tokens per episode."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.gconfig = self.gconfig.new(max_new_tokens=num_tokens)


def measure_account(args: argparse.Namespace, folder: str, *, num_tokens: int = 512) -> dict[str, Any]:
    """Return the CPU time of the master per sampled token, while it collects, scatters and lets a worker run."""
    batch_size, tokens, own_s = 256, 0, 0.0
    with served(0.0, num_tokens=num_tokens) as address, waiters(folder, 1, 1) as (workers, engines):
        config = InferenceEngineConfig(
            experiment_name="benchmark",
            trial_name="account",
            fileroot=folder,
            server_addrs=[address],
            consumer_batch_size=batch_size,
            max_concurrent_rollouts=batch_size,
            max_head_offpolicyness=4,
        )
        rollout = RemoteSGLangEngine(config)
        rollout.initialize(None, None)
        try:
            loader = [[{"input_ids": list(range(5, 5 + PROMPT_TOKENS))} for _ in range(batch_size)]]
            workflow = LongRequest(num_tokens)
            for version in range(args.rounds + 2):
                began_s = time.process_time()
                batch: Any = rollout.prepare_batch(loader, workflow)
                step_of_waiters(workers.scatter(batch), engines, version=version)
                rollout.set_version(version + 1)
                if version > 1:
                    tokens += int(batch["loss_mask"].sum())
                    own_s += time.process_time() - began_s
        finally:
            rollout.destroy()
    return {
        "tokens_per_episode": num_tokens,
        "cpu_us_per_token": 1e6 * own_s / tokens,
    }


# Rollout workers


class LongGroup(LongRequest):
    """A group of requests of many tokens per episode."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict:
        """Sample them at once."""
        return concat_padded_tensors(
            await asyncio.gather(*(super(LongGroup, self).arun_episode(engine, data) for _ in range(GROUP)))
        )


def measure_episodes(args: argparse.Namespace, folder: str, *, nums: Sequence[int] = (0, 1)) -> dict[str, Any]:
    """Return episodes per second, and CPU per episode of the master and of all rollout workers, by their number."""
    num_tokens = args.tokens
    found: dict[str, Any] = {"samples": GROUP, "tokens_per_sample": num_tokens, "nums": list(nums)}
    for num in nums:
        given = [f"cluster.fileroot={folder}", "actor.path=none", f"workers.rollout.num={num}"]
        config = load_expr_config(["--config", str(CONFIG), *given], GRPOConfig)[0]
        workflow = LongGroup(num_tokens)
        with served(0.0, num_tokens=num_tokens) as address, Workers(config, is_declared=True) as workers:
            config.rollout = InferenceEngineConfig(
                experiment_name="benchmark",
                trial_name=f"rollout-{num}",
                fileroot=folder,
                server_addrs=[address],
                consumer_batch_size=_EPISODES,
                max_concurrent_rollouts=_EPISODES,
                max_head_offpolicyness=4,
            )
            clients = workers.rollouts(functools.partial(LongGroup, num_tokens), None)
            rollout = RemoteSGLangEngine(config.rollout, hand_out=workers.scatter, clients=clients)
            rollout.initialize(None, None)
            try:
                measured = _take_batches(rollout, workflow, args.rounds)
            finally:
                rollout.destroy()
                if clients is not None:
                    clients.close()
        found |= {f"{name}_{num}": value for name, value in measured.items()}
    return found


_EPISODES = 64  # of a batch


def _take_batches(rollout: RemoteSGLangEngine, workflow: OneRequest, rounds: int) -> dict[str, float]:
    """Consume batches as a trainer without work would; the first two warm up."""
    loader = [[{"input_ids": list(range(5, 5 + PROMPT_TOKENS))} for _ in range(_EPISODES)]]
    others = [one for one in psutil.Process().children(recursive=True) if "RolloutWorker" in one.name()]
    for version in range(rounds + 2):
        if version == 2:
            began, own_s, other_s = time.perf_counter(), time.process_time(), sum(map(_cpu_s, others))
        rollout.prepare_batch(loader, workflow)
        rollout.set_version(version + 1)
    count = rounds * _EPISODES
    return {
        "episodes_per_s": count / (time.perf_counter() - began),
        "master_cpu_us": 1e6 * (time.process_time() - own_s) / count,
        "workers_cpu_us": 1e6 * (sum(map(_cpu_s, others)) - other_s) / count,
    }


# Scale


def measure_scale(
    args: argparse.Namespace, folder: str, *, infer_s: float = 1.0, train_s: float = 2.0, ranks_told: int = 1000
) -> dict[str, Any]:
    """Return the share of a step for which the master computes, and what that means for more ranks."""
    num_ranks = args.roles * args.ranks
    tensors = samples(16 * num_ranks, prompt=128, completion=384)
    walls, cpus, scatters, rays = [], [], [], []
    with waiters(folder, args.roles, args.ranks) as (workers, engines):
        servers = [one for one in psutil.Process().children(recursive=True) if one.name() in ("raylet", "gcs_server")]
        assert servers, "Ray runs as children of this process"
        for version in range(args.rounds + 1):
            began, began_s, rays_began = time.perf_counter(), time.process_time(), sum(map(_cpu_s, servers))
            batch = workers.scatter(tensors)
            scattered_s = time.process_time()
            step_of_waiters(batch, engines, infer_s=infer_s, train_s=train_s, version=version)
            walls.append(time.perf_counter() - began)
            cpus.append(time.process_time() - began_s)
            scatters.append(scattered_s - began_s)
            rays.append(sum(map(_cpu_s, servers)) - rays_began)
    wall_s, cpu_s, scatter_s, ray_s = (statistics.median(one[1:]) for one in (walls, cpus, scatters, rays))
    told_s = infer_s + train_s
    num_calls = 3 * num_ranks + args.ranks  # infer, train and snapshot on all, and the version of one group
    rank_call_s = (cpu_s - scatter_s) / num_calls
    told_cpu_s = cpu_s * ranks_told / num_ranks
    return {
        "roles": args.roles,
        "ranks": num_ranks,
        "tokens": int(tensors["attention_mask"].sum()),
        "told_s": told_s,
        "wall_s": wall_s,
        "master_cpu_s": cpu_s,
        "scatter_cpu_s": scatter_s,
        "ray_cpu_s": ray_s,
        "share_percent": 100 * cpu_s / told_s,
        "rank_call_ms": 1e3 * rank_call_s,
        "ranks_told": ranks_told,
        "cpu_s_at_ranks_told": told_cpu_s,
        "shortest_step_s": 10 * told_cpu_s,  # of which the master's share is 10 %
    }


CASES: dict[str, tuple[Callable[..., dict[str, Any]], str]] = {
    "step": (
        measure_step,
        "script {script_s:.2f} s; migrated {migrated_s:.2f} s, ratio {migrated_ratio:.3f} "
        "(CPU {migrated_cpu_ratio:.3f})"
        "; graph {graph_s:.2f} s, ratio {graph_ratio:.3f} (CPU {graph_cpu_ratio:.3f})",
    ),
    "overlap": (measure_overlap, "three calls of 1 s on three groups: {wall_s:.2f} s, overlap {overlap:.2f}"),
    "data": (
        measure_data,
        "MiB/s: scatter {scatter_mib_per_s:.0f} (ratio {scatter_ratio:.2f} to put), call {call_mib_per_s:.0f} (ratio "
        "{call_ratio:.2f} to an actor), fetch {fetch_mib_per_s:.0f} (ratio {fetch_ratio:.2f} to get)",
    ),
    "account": (measure_account, "{cpu_us_per_token:.2f} us of the master's CPU per sampled token"),
    "episodes": (
        measure_episodes,
        "of {samples} samples of {tokens_per_sample} tokens: in the master {episodes_per_s_0:.0f}/s, "
        "{master_cpu_us_0:.0f} us of its CPU each; on a worker {episodes_per_s_1:.0f}/s, {master_cpu_us_1:.0f} us of "
        "the master's and {workers_cpu_us_1:.0f} us of its own",
    ),
    "scale": (
        measure_scale,
        "{ranks} ranks in {roles} groups: master {master_cpu_s:.3f} s of CPU in a step of {told_s:g} s, "
        "{share_percent:.1f} %; {rank_call_ms:.2f} ms per rank and call; at {ranks_told} ranks "
        "{cpu_s_at_ranks_told:.2f} s, 10 % of a step of {shortest_step_s:.0f} s",
    ),
}

if __name__ == "__main__":
    main()
