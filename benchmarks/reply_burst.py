"""What happens to the rollout client when long replies come all at once, and when servers come back one by one.

    python benchmarks/reply_burst.py [--case burst] [--replies 400] [--tokens 31744] [--seconds 4] [--profile]
        [--settle 6] [--json] [--out FILE]

The servers are real HTTP servers on loopback, in other processes, that answer canned tokens and cost little. In `burst`
four of them answer so many requests with so many tokens each, all within some seconds. Lag is how much later than due a
timer of the client's event loop fires, asked for every 5 ms: that long an answer to /health, a pause or a deadline may
wait. CPU is that of the client's process, and of its event loop; the digest is of the batch, whose numbers are checked.
In `herd` three servers of 32 slots run 60 requests and are killed. The first is started again, and some seconds later
the others: requests that each holds when all ran, when the first has been back for these seconds, and all have.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from canned_server import answer_of
from circumstances import options, report
from runtime_overhead import cpu_by_thread, watched
from tensordict import TensorDict

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import ModelRequest
from arealite.api.workflow_api import RolloutWorkflow
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.workflow.trajectory import trajectory_from_response

PROMPT = [5, 6, 7]
HERD_SLOTS, HERD_REQUESTS, HERD_S = 32, 60, 600.0


class OneRequest(RolloutWorkflow):
    """One request per episode; the reward is constant."""

    def __init__(self, num_tokens: int) -> None:
        self.gconfig = GenerationHyperparameters(max_new_tokens=num_tokens)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict:
        """Sample once."""
        return trajectory_from_response(await engine.agenerate(ModelRequest(PROMPT, self.gconfig)), 1.0)


def main() -> None:
    """Measure every case and print one line each."""
    parser = options(__doc__)
    parser.add_argument("--case", choices=["burst", "herd"], help="only this one")
    parser.add_argument("--replies", type=int, default=400, help="of the burst")
    parser.add_argument("--tokens", type=int, default=31744, help="of each reply")
    parser.add_argument("--seconds", type=float, default=4.0, help="from the first reply to the last")
    parser.add_argument("--settle", type=float, default=6.0, help="seconds that the servers of the herd are watched")
    parser.add_argument("--profile", action="store_true", help="print where the event loop spends its time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.case in (None, "burst"):
        report(args, measure_burst(args))
    if args.case in (None, "herd"):
        report(args, measure_herd(args.settle))


def measure_burst(args: argparse.Namespace) -> dict[str, Any]:
    """Let servers answer all requests within some seconds, and check the batch."""
    count, num_tokens = args.replies, args.tokens
    servers = [Canned(num_tokens, 1.5 * args.seconds) for _ in range(4)]
    with connected(servers, count) as engine:
        began, began_s, cpu = time.perf_counter(), time.process_time(), cpu_by_thread()
        with watched(engine, is_profiled=args.profile) as lags:
            batch = engine.prepare_batch([[{} for _ in range(count)]], OneRequest(num_tokens))
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_s
        loop_s = (cpu_by_thread() - cpu)["arealite-rollout"]
    tokens, logprobs = answer_of(num_tokens)
    row = {
        "input_ids": torch.tensor(PROMPT + tokens),
        "loss_mask": torch.tensor([0] * len(PROMPT) + [1] * num_tokens),
        "logprobs": torch.tensor([0.0] * len(PROMPT) + logprobs),
        "versions": torch.tensor([-1] * len(PROMPT) + [1_000_000_000] * num_tokens),
    }
    for key, expected in row.items():
        assert batch[key].dtype == expected.dtype and (batch[key] == expected).all(), key
    lags.sort()
    return {
        "case": "burst",
        "replies": count,
        "tokens": num_tokens,
        "wall_s": seconds,
        "cpu_s": cpu_s,
        "loop_cpu_ms_per_reply": 1e3 * loop_s / count,
        "lag_p99_ms": 1e3 * lags[int(0.99 * len(lags))],
        "lag_max_ms": 1e3 * lags[-1],
        "rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "digest": digest_of(batch),
    }


def measure_herd(settle_s: float) -> dict[str, Any]:
    """Kill all servers, start the first again, then the others, and count the requests of each."""
    servers = [Canned(16, HERD_S, slots=HERD_SLOTS) for _ in range(3)]
    rows: list[dict[str, Any]] = [{} for _ in range(HERD_REQUESTS)]
    with connected(servers, len(rows)) as engine:
        threading.Thread(target=lambda: swallow(engine, rows), daemon=True).start()
        while sum(before := [one.count() for one in servers]) < len(rows):
            time.sleep(0.1)
        for one in servers:
            one.kill()
        time.sleep(settle_s)
        servers[0].start()
        time.sleep(settle_s)
        first_back = servers[0].count()
        for one in servers[1:]:
            one.start()
        time.sleep(settle_s)
        all_back = [one.count() for one in servers]
    return {"case": "herd", "before": before, "first_back": [first_back, 0, 0], "all_back": all_back}


def swallow(engine: RemoteSGLangEngine, rows: Sequence[dict[str, Any]]) -> None:
    """Run episodes until the engine is destroyed."""
    with contextlib.suppress(RuntimeError):
        engine.rollout_batch(rows, OneRequest(16))


def digest_of(batch: TensorDict) -> str:
    """Return what batches of equal numbers share."""
    found = hashlib.sha256()
    for key in sorted(batch.keys()):
        found.update(f"{key} {batch[key].dtype} {list(batch[key].shape)}".encode())
        found.update(batch[key].numpy().tobytes())
    return found.hexdigest()[:16]


class Canned:
    """A canned server in another process, which can be killed and started again at its address."""

    def __init__(self, num_tokens: int, delay_s: float, *, slots: int = 0) -> None:
        self.num_tokens, self.delay_s, self.slots, self.port = num_tokens, delay_s, slots, 0
        self.start()

    def start(self) -> None:
        """Return when it listens."""
        script = str(Path(__file__).with_name("canned_server.py"))
        command = [sys.executable, script, *map(str, (self.num_tokens, self.delay_s, self.port, self.slots))]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().decode().strip()
        self.port = int(self.address.rpartition(":")[2])

    def count(self) -> int:
        """Return how many requests it holds."""
        with urllib.request.urlopen(f"http://{self.address}/count", timeout=60) as reply:
            return int(json.load(reply)["count"])

    def kill(self) -> None:
        """End it, with its connections."""
        self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def connected(servers: Sequence[Canned], concurrency: int) -> Iterator[RemoteSGLangEngine]:
    """Return an engine on these servers, which end with it."""
    with tempfile.TemporaryDirectory() as folder:
        config = InferenceEngineConfig(
            experiment_name="burst",
            trial_name="burst",
            fileroot=folder,
            server_addrs=[one.address for one in servers],
            consumer_batch_size=concurrency,
            max_concurrent_rollouts=concurrency,
            max_head_offpolicyness=0,
            request_retries=1000,
        )
        engine = RemoteSGLangEngine(config)
        try:
            engine.initialize(None, None)
            yield engine
        finally:
            engine.destroy()
            for one in servers:
                one.kill()


if __name__ == "__main__":
    main()
