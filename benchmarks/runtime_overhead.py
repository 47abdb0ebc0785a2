"""What the rollout runtime itself costs: episodes of one request of 64 tokens, against a server that costs nothing.

    python benchmarks/runtime_overhead.py [--seconds 10] [--profile] [--json] [--out FILE]

The server is a real HTTP server on loopback, in another process, that reads a request and answers 64 canned tokens
after a delay. There is no model and no tokenizer; ledger and rollout files are written to a temporary run folder.
`client` sends requests without episodes; `throughput` runs episodes as fast as they go, with no delay; `concurrency`
keeps 4,096 episodes in flight that take four seconds each, give or take a third: about as many per second as the
machine can do (with a long tail the bound on staleness would wait for stragglers, which is no overhead). Lag is how
much later than due a timer of the event loop fires; it is asked for every 5 ms. The trainer only takes batches.
`log` writes the rollout file of 256 made-up episodes of 512 tokens without texts, and the same rows as JSON lines, as
was done once: bytes of a token, and microseconds of CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import json
import pstats
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from circumstances import options, report
from tensordict import TensorDict

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import ModelRequest, ModelResponse, PromptId
from arealite.api.workflow_api import RolloutWorkflow
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.rollout.account.rollout_file import batch_files, read_file
from arealite.rollout.account.store import RolloutStore
from arealite.rollout.prompts import Episode, Prompt
from arealite.workflow.trajectory import trajectory_from_response

PROMPT_TOKENS = 32
TOKENS = 64
LOOK_S = 0.005

Loader = list[list[dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """One scenario."""

    name: str
    concurrency: int
    batch_size: int
    delay_s: float


CASES = (
    Case("client", concurrency=512, batch_size=4096, delay_s=0.0),
    Case("throughput", concurrency=512, batch_size=256, delay_s=0.0),
    Case("concurrency", concurrency=4096, batch_size=512, delay_s=4.0),
)


class OneRequest(RolloutWorkflow):
    """One request per episode; the reward is constant."""

    def __init__(self) -> None:
        self.gconfig = GenerationHyperparameters(n_samples=1, max_new_tokens=TOKENS)
        self.num_running = 0
        self.most_running = 0

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict:
        """Sample once."""
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            request = ModelRequest(data["input_ids"], self.gconfig, rid=str(data["prompt_id"]))
            return trajectory_from_response(await engine.agenerate(request), 1.0)
        finally:
            self.num_running -= 1


class ManyRequests(OneRequest):
    """All requests of a case in one episode, so that next to nothing but the client runs."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict:
        """Sample `batch_size` times."""
        left = iter(range(self.case.batch_size))

        async def sample() -> Any:
            for index in left:
                response = await engine.agenerate(ModelRequest(data["input_ids"], self.gconfig, rid=str(index)))
            return response

        responses = await asyncio.gather(*(sample() for _ in range(self.case.concurrency)))
        self.most_running = self.case.concurrency
        return trajectory_from_response(responses[0], 1.0)


def main() -> None:
    """Measure every case and print one line each."""
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each case, after a warm-up")
    parser.add_argument("--case", choices=[*(case.name for case in CASES), "log"], help="only this one")
    parser.add_argument("--profile", action="store_true", help="print where the event loop spends its time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        if args.case not in (None, case.name):
            continue
        report(args, measure(case, seconds=args.seconds, is_profiled=args.profile), described)
    if args.case in (None, "log"):
        report(args, measure_log())


def described(result: dict[str, Any]) -> str:
    """Return a result as text."""
    shares = ", ".join(f"{name} {cpu_us:.0f}" for name, cpu_us in result["cpu_us_by_thread"].items())
    return (
        f"{result['case']:11} {result['episodes_per_s']:6.0f} episodes/s, {result['cpu_us']:4.0f} us of CPU each, "
        f"{result['most_running']:4} in flight; lag p99 {result['lag_p99_ms']:5.1f} ms, "
        f"max {result['lag_max_ms']:6.1f} ms ({result['cores']} cores, load {result['load']})\n"
        f"{'':11} us by thread: {shares}"
    )


def measure(case: Case, *, seconds: float, is_profiled: bool) -> dict[str, Any]:
    """Run one case for some seconds, after a warm-up."""
    workflow = ManyRequests(case) if case.name == "client" else OneRequest()
    with tempfile.TemporaryDirectory() as folder, served(case.delay_s) as address:
        config = InferenceEngineConfig(
            experiment_name="overhead",
            trial_name=case.name,
            fileroot=folder,
            server_addrs=[address],
            consumer_batch_size=case.batch_size,
            max_concurrent_rollouts=case.concurrency,
            max_head_offpolicyness=16,
        )
        engine = RemoteSGLangEngine(config)
        engine.initialize(None, None)
        try:
            row = {"input_ids": list(range(5, 5 + PROMPT_TOKENS))}
            loader = [[dict(row) for _ in range(case.batch_size)]]
            take_batches(engine, workflow, loader, seconds=max(min(1.0, seconds), 2 * case.delay_s))
            with watched(engine, is_profiled=is_profiled) as lags:
                began, began_cpu = time.perf_counter(), cpu_by_thread()
                count = take_batches(engine, workflow, loader, seconds=seconds)
                cpu, wall_s = cpu_by_thread() - began_cpu, time.perf_counter() - began
        finally:
            engine.destroy()
    lags.sort()
    return {
        "case": case.name,
        "concurrency": case.concurrency,
        "delay_s": case.delay_s,
        "episodes": count,
        "episodes_per_s": count / wall_s,
        "cpu_us": 1e6 * cpu.total() / count,
        "cpu_us_by_thread": {name: 1e6 * cpu_s / count for name, cpu_s in cpu.most_common()},
        "most_running": workflow.most_running,
        "lag_p99_ms": 1e3 * lags[int(0.99 * len(lags))],
        "lag_max_ms": 1e3 * lags[-1],
    }


def measure_log(num_episodes: int = 256, num_tokens: int = 512) -> dict[str, Any]:
    """Store episodes whose ids are log-uniform, as those of texts nearly are; return what a token takes."""
    draw = torch.Generator().manual_seed(0)
    episodes = []
    for index in range(num_episodes):
        ids = (151_936 ** torch.rand(PROMPT_TOKENS + num_tokens, generator=draw)).int().tolist()
        logprobs = torch.empty(num_tokens).exponential_(generator=draw).neg().tolist()
        sampled = (ids[PROMPT_TOKENS:], logprobs, [0] * num_tokens)
        episode = Episode(Prompt(PromptId(0, index), workflow=OneRequest()), attempt=0, head_version=0, seed=1)
        episode.trajectory = trajectory_from_response(ModelResponse(ids[:PROMPT_TOKENS], *sampled, "stop", ""), 1.0)
        episodes.append(episode)
    with tempfile.TemporaryDirectory() as folder:
        store = RolloutStore(Path(folder))
        for _ in range(2):  # the first warms up
            began_s = time.process_time()
            store.append("step_0", episodes, 0)
            store.flush()
            stored_s = time.process_time() - began_s
        _, file = batch_files(Path(folder, "step_0")).values()
        rows, num_bytes = list(read_file(file)), file.stat().st_size
        store.close()
    began_s = time.process_time()
    json_bytes = sum(len(json.dumps(row)) for row in rows)
    json_s, count = time.process_time() - began_s, num_episodes * (PROMPT_TOKENS + num_tokens)
    found = {"bytes": num_bytes / count, "cpu_us": 1e6 * stored_s / count}
    return {
        "case": "log",
        "tokens": count,
        **found,
        "json_bytes": json_bytes / count,
        "json_cpu_us": 1e6 * json_s / count,
    }


def take_batches(engine: RemoteSGLangEngine, workflow: OneRequest, loader: Loader, *, seconds: float) -> int:
    """Consume batches as a trainer without work would, and return the number of episodes (requests of `client`)."""
    (rows,) = loader
    count = 0
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        if isinstance(workflow, ManyRequests):
            engine.rollout_batch([dict(rows[0])], workflow)
        else:
            batch = engine.prepare_batch(loader, workflow)
            assert batch.batch_size[0] == len(rows), batch.batch_size
            engine.set_version(engine.get_version() + 1)
        count += len(rows)
    return count


def cpu_by_thread() -> Counter[str]:
    """Return the seconds of CPU that each thread of ours has taken."""
    threads = [thread for thread in threading.enumerate() if thread.ident is not None]
    return Counter({one.name: time.clock_gettime(time.pthread_getcpuclockid(one.ident)) for one in threads})


@contextlib.contextmanager
def watched(engine: RemoteSGLangEngine, *, is_profiled: bool) -> Iterator[list[float]]:
    """Collect the lag of the event loop, and profile it."""
    lags: list[float] = []
    is_over = threading.Event()

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        profile = cProfile.Profile()
        if is_profiled:
            profile.enable()
        while not is_over.is_set():
            due = loop.time() + LOOK_S
            await asyncio.sleep(LOOK_S)
            lags.append(loop.time() - due)
        if is_profiled:
            profile.disable()
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(45)

    loop = engine._require_executor().loop.loop
    watching = asyncio.run_coroutine_threadsafe(watch(), loop)
    try:
        yield lags
    finally:
        is_over.set()
        watching.result(60)


@contextlib.contextmanager
def served(delay_s: float, *, num_tokens: int = TOKENS) -> Iterator[str]:
    """Run the server in another process."""
    command = [sys.executable, str(Path(__file__).with_name("canned_server.py")), str(num_tokens), str(delay_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()
    finally:
        process.kill()
        process.wait(10)


if __name__ == "__main__":
    main()
