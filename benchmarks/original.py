"""Parts of the original, AReaL 1.0.4, against ours on CPUs, in turn in one run: its rollout runtime and its packing.

    python benchmarks/original.py [--case rollout] [--rounds 5] [--seconds 5] [--json] [--out FILE]

`rollout`: as many episodes as go, of one request of 64 tokens, against the server of `runtime_overhead.py`, which costs
nothing; 512 at a time, batches of 256, which are padded as its trainer pads them. Ours writes ledger and rollout files
meanwhile, as always; the original keeps no account, and dumps no trajectories by default. `lognormal` and `half`: 1,024
rows into packed micro-batches of at most 10,240 tokens (see `packing.py`): finding them, and all of it. Both sides have
one thread of torch. The wheel of the original comes from PyPI, without what it names for GPUs and clusters, to a folder
beside ours (`.venv-original`), and runs on our torch, as it asks for one below 2.11.

What can't be run here: its servers, its training engines, and with them a whole step. They want CUDA, and
`transformers` up to 5.3.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from circumstances import options, report
from packing import pack
from runtime_overhead import PROMPT_TOKENS, OneRequest, served, take_batches

from arealite.api.cli_args import InferenceEngineConfig
from arealite.engine.sglang_remote import RemoteSGLangEngine

REPOSITORY = Path(__file__).parents[1]
VERSION = "1.0.4"
PACKAGES = (
    *(f"areal=={VERSION}", "hydra-core==1.4.0.dev1", "omegaconf==2.4.0.dev2", "antlr4-python3-runtime==4.13.2"),
    *("aiofiles", "blinker", "colorlog", "einops", "flask", "httpx", "itsdangerous", "lark", "llvmlite", "numba"),
    *("pybase64", "tenacity", "torchdata", "uvloop"),
)
"""What importing its runtime needs besides our own environment."""
ROLLOUT, KINDS = "rollout", ("lognormal", "half")
CONCURRENCY, BATCH_SIZE, WARM_UP_S = 512, 256, 1.0
NUM_ROWS, PACK_ROUNDS = 1024, 3
UNITS = {ROLLOUT: ("us", "cpu_us"), "pack": ("micro_batches", "plan_ms", "pack_ms")}
"""Of an episode, and of all rows."""

Words = tuple[Any, ...]
Side = Callable[[Words], dict[str, Any]]


def main() -> None:
    """Measure every case and print one line each."""
    parser = options(__doc__)
    parser.add_argument("--case", action="append", choices=(ROLLOUT, *KINDS), help="may be repeated")
    parser.add_argument("--rounds", type=int, default=5, help="of both sides")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a side in a round of rollout")
    args = parser.parse_args()
    torch.set_num_threads(1)
    packages = install_peer()
    with served(0.0) as address, original(packages, address) as ask, runtime(address) as run:
        sides = {"original": ask, "ours": run}
        for case in args.case or (ROLLOUT, *KINDS):
            words = (ROLLOUT, args.seconds) if case == ROLLOUT else ("pack", case, NUM_ROWS, PACK_ROUNDS)
            if case == ROLLOUT:
                for side in sides.values():
                    side((ROLLOUT, WARM_UP_S))
            result = {"case": case, "rounds": args.rounds, "version": VERSION, **measure(sides, words, args.rounds)}
            report(args, result, described)


def measure(sides: dict[str, Side], words: Words, rounds: int) -> dict[str, Any]:
    """Let the sides take turns; return medians of both, and of the ratios within a round, above 1 if ours is less."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in sorted(sides, reverse=number % 2 == 1):
            found[name].append(sides[name](words))
    result: dict[str, Any] = {}
    for figure in UNITS[words[0]]:
        for name, ones in found.items():
            result[f"{name}_{figure}"] = statistics.median(one[figure] for one in ones)
        pairs = zip(found["original"], found["ours"], strict=True)
        ratios = [theirs[figure] / ours[figure] for theirs, ours in pairs]
        result |= {f"{figure}_ratio": statistics.median(ratios), f"{figure}_spread": [min(ratios), max(ratios)]}
    return result


def described(result: dict[str, Any]) -> str:
    """Say a result in one line."""
    figures = [key.removesuffix("_ratio") for key in result if key.endswith("_ratio")]
    parts = [
        f"{figure} {result[f'original_{figure}']:.4g} and ours {result[f'ours_{figure}']:.4g}, "
        f"{result[f'{figure}_ratio']:.2f} times ({' to '.join(f'{end:.2f}' for end in result[f'{figure}_spread'])})"
        for figure in figures
    ]
    return f"{result['case']:9} {'; '.join(parts)} ({result['cores']} cores, load {result['load']})"


@contextlib.contextmanager
def original(packages: Path, address: str) -> Iterator[Side]:
    """Start the original in a process of its own, which rests between its turns."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("original_peer.py")), address, str(CONCURRENCY), str(BATCH_SIZE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def ask(words: Words) -> dict[str, Any]:
        print(*words, file=stdin, flush=True)
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"AReaL must answer: got status {process.wait(60)}. See its output above.")
        found: dict[str, Any] = json.loads(line)
        return found

    try:
        yield ask
    finally:
        stdin.close()
        process.wait(60)


@contextlib.contextmanager
def runtime(address: str) -> Iterator[Side]:
    """Start our runtime on the same server."""
    loader = [[{"input_ids": list(range(5, 5 + PROMPT_TOKENS))} for _ in range(BATCH_SIZE)]]
    with tempfile.TemporaryDirectory() as folder:
        config = InferenceEngineConfig(
            experiment_name="original",
            trial_name="ours",
            fileroot=folder,
            server_addrs=[address],
            consumer_batch_size=BATCH_SIZE,
            max_concurrent_rollouts=CONCURRENCY,
            max_head_offpolicyness=16,
        )
        engine = RemoteSGLangEngine(config)
        engine.initialize(None, None)

        def run(words: Words) -> dict[str, Any]:
            if words[0] == "pack":
                return pack(*words[1:])
            began, began_cpu = time.perf_counter(), time.process_time()
            count = take_batches(engine, OneRequest(), loader, seconds=float(words[1]))
            wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
            return {"us": 1e6 * wall_s / count, "cpu_us": 1e6 * cpu_s / count}

        try:
            yield run
        finally:
            engine.destroy()


def install_peer() -> Path:
    """Return the folder with the packages of the original, which the first call makes."""
    folder = REPOSITORY / ".venv-original"
    if not (folder / ".installed").exists():
        print(f"installing AReaL {VERSION} into {folder}", file=sys.stderr, flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
        subprocess.run([*pip, *PACKAGES], check=True)
        (folder / ".installed").touch()
    return folder


if __name__ == "__main__":
    main()
