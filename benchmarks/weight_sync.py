"""What a weight update costs, and for how long it stops generation, against the transfer alone.

    python benchmarks/weight_sync.py [--rounds 7] [--model small] [--json] [--out benchmarks/results/weight_sync.jsonl]
    python benchmarks/weight_sync.py --senders 2 [--mbit 500] [--rounds 7] [--model small] [--json] [--out ...]

One trainer and one embedded server, each a process with one thread, which generates 16 completions without end
meanwhile. A round measures, in turn: `alone`, the same tensors broadcast over gloo from this process to another one
that does nothing else; and `publish_weights` by broadcast, through the disk, by broadcast without a canary, and of a
policy with LoRA on q_proj and v_proj in both ways: `whole`, its seconds; `pause`, for how long requests were held;
`sent_mib`, the tensors sent. Models in float32, of 0.2, 4.6 and 53 million parameters. Medians over the rounds;
`pause_of_alone` is the median of ratios within a round.

With `--senders N`: a trainer of N ranks, each on a host of its own, and one server on another; no host of a rank sends
more than `--mbit` megabits per second (hosts are network namespaces, which need root). A round is an update from one
sender and one from all N, both in groups that an update before has formed: `whole`, its seconds.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from async_vs_sync import configured, make_actor, served
from circumstances import options, report

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.io_struct import ModelRequest, ParamSpec
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.utils.network import LOOPBACK, hold_port, port_of
from arealite.utils.secret import SECRET_VARIABLE
from arealite.utils.weight_transfer import close_group, join_group, receive_bucket, send_bucket
from arealite.weights.publish import publish_weights

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "quickstart"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from cluster.netns import network
from tiny_model import make_tiny_model

SIZES: dict[str, dict[str, int]] = {
    "quickstart": {},
    "small": {"hidden": 256, "layers": 6, "heads": 4, "mlp": 768},
    "large": {"hidden": 768, "layers": 8, "heads": 8, "mlp": 2304},
}
WAYS = {
    "broadcast": ["rollout.weight_update=broadcast"],
    "disk": ["rollout.weight_update=disk"],
    "no canary": ["rollout.weight_update=broadcast", "rollout.weight_check.canary_tokens=0"],
    "lora": ["rollout.weight_update=broadcast"],
    "lora disk": ["rollout.weight_update=disk"],
}
LORA = ["actor.lora.rank=16", "actor.lora.target_modules=[q_proj, v_proj]"]
RUNNING = 16
PORT = 29500
"""Of servers and of the first rank, on hosts of their own."""
WARM_UP = 1


def main() -> None:
    """Measure every model and print one line for each way."""
    parser = options(__doc__)
    parser.add_argument("--model", choices=SIZES, help="only this one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--senders", type=int, default=1, help="ranks of the trainer, each on a host of its own")
    parser.add_argument("--mbit", type=int, default=500, help="what such a host sends per second")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, size in SIZES.items():
        if args.model in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                if args.senders > 1:
                    result = measure_senders(name, size, Path(folder), args.rounds, args.senders, args.mbit)
                else:
                    result = measure(name, size, Path(folder), args.rounds)
            report(args, result, described)


def measure(name: str, size: dict[str, int], folder: Path, rounds: int) -> dict[str, Any]:
    """Alternate between the transfer alone and updates in both ways."""
    model = str(folder / "model")
    make_tiny_model(model, **size)
    found: dict[str, list[float]] = defaultdict(list)
    with served(model) as (address, _):
        actor, adapted = make_actor(model), make_actor(model, *LORA)
        specs = [spec for bucket in actor.get_param_specs() for spec in bucket]
        try:
            with receiver(specs) as send, engines(model, address, folder) as rollouts:
                for number in range(WARM_UP + rounds):
                    one = {"alone_s": send()}
                    for way, rollout in rollouts.items():
                        policy = adapted if "lora" in way else actor
                        one |= {f"{way}_{key}": value for key, value in updated(policy, rollout, number).items()}
                        one[f"{way}_pause_of_alone"] = one[f"{way}_pause_s"] / one["alone_s"]
                    for key, value in one.items() if number >= WARM_UP else ():
                        found[key].append(value)
        finally:
            actor.destroy()
            adapted.destroy()
    medians = {key: statistics.median(values) for key, values in found.items()}
    spread = {key: [min(values), max(values)] for key, values in found.items()}
    mib = sum(spec.size for spec in specs) / 2**20
    return {"model": name, "mib": mib, "rounds": rounds, **medians, "spread": spread}


@contextmanager
def receiver(specs: list[ParamSpec]) -> Iterator[Any]:
    """Start a process that receives the tensors, and yield what sends them and returns the seconds until it has."""
    ours, theirs = multiprocessing.Pipe()
    with hold_port() as held:
        port = port_of(held)
        process = multiprocessing.get_context("spawn").Process(target=receive, args=(port, specs, theirs), daemon=True)
        process.start()
        group = join_group(LOOPBACK, port, 0, 2, "alone")
    tensors = [torch.ones(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]

    def send() -> float:
        ours.send("next")
        assert ours.poll(60) and ours.recv() == "ready"
        began = time.perf_counter()
        send_bucket(group, tensors)
        assert ours.poll(600) and ours.recv() == "received"
        return time.perf_counter() - began

    try:
        yield send
    finally:
        ours.send("end")
        process.join(60)
        close_group(group)


def receive(port: int, specs: list[ParamSpec], pipe: Connection) -> None:
    """Receive the tensors as often as told."""
    torch.set_num_threads(1)
    group = join_group(LOOPBACK, port, 1, 2, "alone")
    while pipe.recv() == "next":
        pipe.send("ready")
        receive_bucket([(group, spec) for spec in specs])
        pipe.send("received")


@contextmanager
def engines(model: str, address: str, folder: Path) -> Iterator[dict[str, RemoteInferenceEngine]]:
    """Yield a client of the server for each way."""
    rollouts: dict[str, RemoteInferenceEngine] = {}
    try:
        for way, keys in WAYS.items():
            trial = way.replace(" ", "-")
            names = [f"rollout.server_addrs=[{address}]", f"cluster.fileroot={folder}", f"trial_name={trial}"]
            config = configured(model, *names, *keys)
            rollouts[way] = RemoteInferenceEngine(config.rollout)
            rollouts[way].initialize(None, None)
        yield rollouts
    finally:
        for rollout in rollouts.values():
            rollout.destroy()


def updated(actor: FSDPPPOActor, rollout: RemoteInferenceEngine, version: int) -> dict[str, float]:
    """Update the server while it generates."""
    gconfig = GenerationHyperparameters(max_new_tokens=900, min_new_tokens=900)
    is_ended = threading.Event()

    async def generate() -> None:
        while True:
            await rollout.agenerate(ModelRequest([5, 6], gconfig))

    async def run() -> None:
        tasks = [asyncio.create_task(generate()) for _ in range(RUNNING)]
        await asyncio.to_thread(is_ended.wait)
        for task in tasks:
            task.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    time.sleep(0.5)  # until all of them run
    rollout.metrics()
    began = time.perf_counter()
    publish_weights(actor, rollout, version)
    whole_s = time.perf_counter() - began
    metrics = rollout.metrics()
    is_ended.set()
    thread.join()
    return {"whole_s": whole_s, "pause_s": metrics["weights/pause_s"], "sent_mib": metrics["weights/sent_mib"]}


def measure_senders(
    name: str, size: dict[str, int], folder: Path, rounds: int, num_ranks: int, mbit: int
) -> dict[str, Any]:
    """Alternate between one sender and all of them, on hosts whose links are held to a rate."""
    model = str(folder / "model")
    make_tiny_model(model, **size)
    server_host = num_ranks + 1
    with network(server_host) as net, ExitStack() as stack:
        for host in range(1, num_ranks + 1):
            net.limit(host, mbit)
        address = f"{net.address(server_host)}:{PORT}"
        command = [sys.executable, "-m", "arealite.server", "--model-path", model, "--host", net.address(server_host)]
        shared = {SECRET_VARIABLE: uuid.uuid4().hex}
        stack.enter_context(running(net.command(server_host, [*command, "--port", str(PORT)]), shared))
        ranks = []
        for rank in range(num_ranks):
            places = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            places |= {"MASTER_ADDR": net.address(1), "MASTER_PORT": PORT, **shared}
            own = [sys.executable, __file__, "--rank", model, address, str(folder), str(rounds)]
            ranks.append(stack.enter_context(running(net.command(rank + 1, own), places)))
        assert [rank.wait(600) for rank in ranks] == [0] * num_ranks
    found: dict[str, Any] = json.loads((folder / "senders.json").read_text())
    medians = {key: statistics.median(values) for key, values in found["whole_s"].items()}
    ratio = statistics.median([one / all_ for one, all_ in zip(*found["whole_s"].values(), strict=True)])
    result = {"model": name, "mib": found["mib"], "rounds": rounds, "mbit": mbit, "whole_s_by_senders": medians}
    return result | {"one_of_all": ratio, "mib_by_sender": found["shares"], "spread": found["whole_s"]}


@contextmanager
def running(command: list[str], environment: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command, and end it with the block."""
    strings = {name: str(value) for name, value in environment.items()}
    process = subprocess.Popen(command, env=os.environ | strings)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def be_rank(model: str, address: str, folder: str, rounds: int) -> None:
    """Be a rank of the trainer, and write what was measured if it is the first."""
    torch.set_num_threads(1)
    names = [f"rollout.server_addrs=[{address}]", f"cluster.fileroot={folder}", "trial_name=senders"]
    config = configured(model, *names, "rollout.weight_check.canary_tokens=0", "rollout.setup_timeout=60")
    actor, num_ranks = make_actor(model), int(os.environ["WORLD_SIZE"])
    rollout = RemoteInferenceEngine(config.rollout)
    rollout.initialize(None, None)
    whole_s: dict[str, list[float]] = {"1": [], str(num_ranks): []}
    version = 0
    for number in range(WARM_UP + rounds):
        for count, measured in whole_s.items():
            rollout.config.weight_update_senders = int(count)
            for is_measured in (False, number >= WARM_UP):  # the first time the groups form
                version += 1
                dist.barrier()
                began = time.perf_counter()
                publish_weights(actor, rollout, version)
                if is_measured:
                    measured.append(time.perf_counter() - began)
    specs = [spec for bucket in actor.get_param_specs(num_senders=num_ranks) for spec in bucket]
    shares = [sum(one.size for one in specs if one.owner == rank) / 2**20 for rank in range(num_ranks)]
    if dist.get_rank() == 0:
        found = {"whole_s": whole_s, "mib": sum(shares), "shares": shares}
        Path(folder, "senders.json").write_text(json.dumps(found))
    rollout.destroy()
    actor.destroy()


def described(result: dict[str, Any]) -> str:
    """Return what each way costs, as text, or what one sender and all of them take."""
    if "one_of_all" in result:
        seconds = result["whole_s_by_senders"].items()
        senders = ", ".join(f"{count} senders {1e3 * whole_s:.0f} ms" for count, whole_s in seconds)
        host = f"{result['mib']:6.1f} MiB, {result['mbit']} Mbit/s per host"
        return f"{result['model']:10} {host}: {senders}, ratio {result['one_of_all']:.2f}"
    return "\n".join(
        f"{result['model']:10} {result[f'{way}_sent_mib']:6.1f} MiB {way:9} "
        f"whole {1e3 * result[f'{way}_whole_s']:6.0f} ms, "
        f"generation pauses for {1e3 * result[f'{way}_pause_s']:5.0f} ms, {result[f'{way}_pause_of_alone']:.2f} of "
        f"the transfer alone ({1e3 * result['alone_s']:.0f} ms; {result['cores']} cores, load {result['load']})"
        for way in WAYS
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_rank(*sys.argv[2:5], rounds=int(sys.argv[5]))
    else:
        main()
