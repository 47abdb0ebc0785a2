"""A step of GRPO against TRL's GRPOTrainer: same model, same number of tokens, same settings, in turn in one run.

    python benchmarks/grpo_step.py [--case tail] [--rounds 5] [--steps 4] [--json] [--out FILE]
    python benchmarks/grpo_step.py --curve

8 prompts with 8 completions each, a model of 0.22 million parameters in float32, one optimizer step per batch, no KL
term. Cases: `fixed`, 64 tokens; `early`, lognormal with a mean of 16, at most 64, which the sides stop in their own way
(TRL by an end-of-sequence token at the given place); `tail`, lognormal with a mean of 64, at most 512. A step is all
that happens between two: sampling, rewards, update, and here the publication of weights to the server. TRL is installed
at the first run (`.venv-trl`, the newest with our torch and transformers), unless `--peer` names an interpreter.

Threads: TRL has `--peer-threads`; our trainer as many and the server one less when they take turns (synchronous), as a
launcher gives them; asynchronous one each. Ratios are of seconds per token within a round, by the clock and by the CPU
time of all processes (on a busy machine only the latter says something); medians and extremes are printed. `--curve`:
the mean reward, the share of even token ids, after 30 steps of three seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from async_vs_sync import MODES, WARM_UP, Case, batches, configured, make_actor, served, train
from circumstances import options, report

from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.utils.cores import compute_with, own_cores

REPOSITORY = Path(__file__).parents[1]
CASES = tuple(
    Case(name, tokens, sigma, longest, group=8)
    for name, tokens, sigma, longest in (("fixed", 64, 0.0, 64), ("early", 16, 0.5, 64), ("tail", 64, 1.0, 512))
)
CURVE = Case("curve", 16, group=8)
CURVE_STEPS, CURVE_SEEDS, CURVE_LR = 30, (1, 2, 3), 2e-3
SIDES = (*MODES, "trl")
Servers = dict[str, tuple[str, psutil.Process]]
SHARES = ("rollout", "train", "weights", "server", "trainer")


class Peer:
    """TRL in a process of its own, which rests between its turns."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def step(self, number: int, first: int = WARM_UP) -> dict[str, Any]:
        """Take so many steps on the batches from the given one on, and return what they took."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(number, first, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"TRL must take its steps: got status {self._process.wait(60)}. See its output above.")
        return json.loads(line)


@contextlib.contextmanager
def peer(python: str, model: str, case: Case, *, threads: int, lr: float, seed: int = 1) -> Iterator[Peer]:
    """Start TRL on the lengths of a case."""
    rows = batches(case)
    lengths = [[length for row in batch for length in row["lengths"]] for batch in rows]
    settings = {"model": model, "lengths": lengths, "messages": rows[0][0]["messages"], "group": case.group}
    settings |= {"threads": threads, "lr": lr, "seed": seed}
    process = subprocess.Popen(
        [python, str(Path(__file__).with_name("trl_peer.py")), json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)},
    )
    try:
        yield Peer(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def install_peer() -> str:
    """Return the interpreter of an environment with TRL, which the first call makes."""
    folder = REPOSITORY / ".venv-trl"
    python, installed = folder / "bin" / "python", folder / ".installed"
    if not installed.exists():
        print(f"installing TRL into {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        versions = [f"{name}=={importlib.metadata.version(name).split('+')[0]}" for name in ("torch", "transformers")]
        if not torch.cuda.is_available():  # the small build, if it can be reached
            once = ["--retries", "0", "--timeout", "10", "--index-url", "https://download.pytorch.org/whl/cpu"]
            subprocess.run([*pip, *once, versions[0]], check=False)
        subprocess.run([*pip, "trl", *versions], check=True)
        installed.touch()
    return str(python)


class Ours:
    """Our trainer in this process, with a server in another for each mode."""

    def __init__(self, actor: FSDPPPOActor, servers: Servers, folder: str, seed: int = 1) -> None:
        self._actor, self._servers, self._folder, self._seed = actor, servers, folder, seed
        self._trials = itertools.count()

    def step(self, case: Case, mode: str, *, steps: int, threads: int, warm_up: int = WARM_UP) -> dict[str, Any]:
        """Take so many steps in a mode, and return what they took."""
        is_async, (address, server) = mode == "asynchronous", self._servers[mode]
        compute_with(1 if is_async else threads)
        config = configured(
            f"{self._folder}/model",
            *("actor.proximal=current", f"seed={self._seed}", f"async_training={str(is_async).lower()}"),
            f"rollout.server_addrs=[{address}]",
            f"cluster.fileroot={self._folder}",
            f"trial_name={case.name}-{mode}-{self._seed}-{next(self._trials)}",
            case=case,
        )
        tokens: list[int] = []
        rewards: list[float] = []

        def note(batch: Any) -> None:
            tokens.append(int(batch["loss_mask"].sum()))
            rewards.append(batch["rewards"].mean().item())

        found = train(case, config, self._actor, server, steps=steps, warm_up=warm_up, on_batch=note)
        shares = {name: found[name] for name in SHARES}
        wall_s, used = steps / found["steps_per_s"], found["server"] + found["trainer"]
        return {"wall_s": wall_s, "cpu_s": wall_s * used, "tokens": sum(tokens[-steps:]), "rewards": rewards, **shares}


def measure(case: Case, ours: Ours, python: str, model: str, lr: float, args: argparse.Namespace) -> dict[str, Any]:
    """Let the sides take turns; return medians, and ratios of seconds to those of TRL."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with peer(python, model, case, threads=args.peer_threads, lr=lr) as trl:
        trl.step(2)
        for number in range(args.rounds):
            for side in SIDES if number % 2 else SIDES[::-1]:
                if side == "trl":
                    found[side].append(trl.step(args.steps))
                else:
                    found[side].append(ours.step(case, side, steps=args.steps, threads=args.peer_threads))
    result: dict[str, Any] = {"case": case.name, "steps": args.steps, "rounds": args.rounds}
    result |= {"peer_threads": args.peer_threads, "trl": found["trl"][0]["trl"]}
    for side in SIDES:
        result[f"{side}_s"] = statistics.median(one["wall_s"] / args.steps for one in found[side])
        result[f"{side}_tokens"] = statistics.median(one["tokens"] / args.steps for one in found[side])
    for side in SIDES:
        result[f"{side}_cpu_s"] = statistics.median(one["cpu_s"] / args.steps for one in found[side])
    for mode in MODES:
        for unit in ("wall_s", "cpu_s"):  # per token: asynchronous batches may be filled in another order
            pairs = zip(found["trl"], found[mode], strict=True)
            ratios = [(peer[unit] / peer["tokens"]) / (one[unit] / one["tokens"]) for peer, one in pairs]
            result[f"{mode}_{unit}_ratio"] = statistics.median(ratios)
            result[f"{mode}_{unit}_spread"] = [min(ratios), max(ratios)]
        for share in SHARES:
            result[f"{mode}_{share}"] = statistics.median(one[share] for one in found[mode])
    return result


def curve(servers: Servers, folder: str, python: str, threads: int) -> dict[str, Any]:
    """Return the mean reward of the last 5 of 30 steps of every side and seed."""
    ends: dict[str, list[float]] = {side: [] for side in SIDES}
    model = f"{folder}/model"
    for seed in CURVE_SEEDS:
        with peer(python, model, CURVE, threads=threads, lr=CURVE_LR, seed=seed) as trl:
            ends["trl"].append(end_of(trl.step(CURVE_STEPS)["rewards"]))
        for mode in MODES:
            actor = make_actor(model, f"actor.optimizer.lr={CURVE_LR}", "actor.proximal=current")
            ours = Ours(actor, servers, folder, seed=seed)
            found = ours.step(CURVE, mode, steps=CURVE_STEPS - 1, threads=threads, warm_up=1)
            ends[mode].append(end_of(found["rewards"]))
            actor.destroy()
    found = {f"{side}_reward": end for side, end in ends.items()}
    return {"case": "curve", "steps": CURVE_STEPS, **found}


def end_of(rewards: Sequence[float]) -> float:
    """Return the mean of the last rewards."""
    return statistics.fmean(rewards[-5:])


def main() -> None:
    """Measure every case and print what was found."""
    parser = options(__doc__)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a side in a round")
    parser.add_argument("--curve", action="store_true", help="compare what is learned instead of speed")
    parser.add_argument("--peer", help="interpreter of an environment that has TRL")
    parser.add_argument("--peer-threads", type=int, default=os.cpu_count(), help="of TRL, and of our trainer by itself")
    args = parser.parse_args()
    python = args.peer or install_peer()
    torch.set_num_threads(args.peer_threads)
    own_cores()  # as a trainer with so many threads finds and binds them
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        threads = {"synchronous": max(1, args.peer_threads - 1), "asynchronous": 1}
        servers = {mode: stack.enter_context(served(f"{folder}/model", threads=threads[mode])) for mode in MODES}
        results: Iterator[dict[str, Any]]
        if args.curve:
            results = iter([curve(servers, folder, python, args.peer_threads)])
        else:
            cases = [case for case in CASES if args.case is None or case.name in args.case]
            results = measured(cases, servers, folder, python, args)
        for result in results:
            report(args, result, described)


def measured(
    cases: Sequence[Case], servers: Servers, folder: str, python: str, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Measure one case after the other on one policy."""
    actor = make_actor(f"{folder}/model", "actor.proximal=current")
    assert actor.config.optimizer is not None
    for case in cases:
        ours = Ours(actor, servers, folder)
        yield measure(case, ours, python, f"{folder}/model", actor.config.optimizer.lr, args)
    actor.destroy()


def described(result: dict[str, Any]) -> str:
    """Return a result as text."""
    where = f"{result['cores']} cores, load {result['load']}"
    if result["case"] == "curve":
        ends = [f"{side} {', '.join(f'{one:.3f}' for one in result[f'{side}_reward'])}" for side in SIDES]
        return f"reward after {result['steps']} steps ({where}): {'; '.join(ends)}"
    trl = f"TRL {result['trl']} {result['trl_s']:.3f} s, {result['trl_tokens']:.0f} tokens"
    lines = [f"{result['case']:6} {trl} ({where})"]
    for mode in MODES:
        low, high = result[f"{mode}_wall_s_spread"]
        shares = ", ".join(f"{name} {result[f'{mode}_{name}']:.0%}" for name in SHARES)
        ratio, by_cpu = result[f"{mode}_wall_s_ratio"], result[f"{mode}_cpu_s_ratio"]
        spread = f"({low:.2f} to {high:.2f}, {result['rounds']} rounds)"
        took = f"{mode:12} {result[f'{mode}_s']:.3f} s"
        lines.append(f"       {took}; per token {ratio:.2f} times as fast {spread}, {by_cpu:.2f} by CPU time; {shares}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
