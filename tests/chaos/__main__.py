"""Kills processes of real runs at random moments and puts broken servers in front of others.

    PYTHONPATH=tests python -m chaos [--short] [--seed N] [--runs N] [--faulty N] [--folder DIR]

Prints what it does, and at last `RESULT {json}`. Exit status: 0 when every run has kept every promise, else 1, and
then the folders of the runs that have not are kept and named.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from arealite.cli.tiny_model import write_tiny_model
from chaos import kills
from chaos.experiment import Experiment
from chaos.flaky_proxy import REFUSED
from chaos.fleet import fleet
from chaos.promises import Verdict, judge

ALLOCATIONS = ("lite.d1p1t1+d1p1t1", "lite.d2p1t1+d2p1t1")
SERVED_ALLOCATION = "lite.d2p1t1+d1p1t1"
TIMEOUT_S = 300.0


class Voice:
    """Prints lines with the time since the start of the run."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def __call__(self, text: str) -> None:
        print(f"  {self.seconds:6.1f} s  {text}", flush=True)


def main() -> int:
    """Run everything and print the result."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a form of less than 3 minutes on 2 cores")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each has the next one")
    parser.add_argument("--runs", type=int, help="runs whose processes are killed")
    parser.add_argument("--faulty", type=int, help="runs whose servers are unreliable")
    parser.add_argument("--folder", type=Path, help="where to work; default is a new temporary folder")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="arealite-chaos-", dir=args.folder))
    started = time.monotonic()
    model = write_tiny_model(out=folder / "model", corpus=None, seed=1)
    faults: Counter[str] = Counter()
    verdicts: list[Verdict] = []
    seeds = {"kills": _seeds(args.seed, args.runs, 2 if args.short else 10)}
    seeds["servers"] = _seeds(args.seed, args.faulty, 1 if args.short else 3)
    for seed in seeds["kills"]:
        experiment = Experiment(folder / f"kills-{seed}", model, ALLOCATIONS[0 if args.short else seed % 2])
        verdicts.append(suffer_kills(experiment, seed, 2 if args.short else 3, faults))
    for seed in seeds["servers"]:
        verdicts.append(suffer_servers(folder / f"servers-{seed}", model, seed, 0 if args.short else 2, faults))
    broken = sum(bool(verdict.broken) for verdict in verdicts)
    result = {
        "faults": dict(sorted(faults.items())),
        "runs": len(verdicts),
        "broken_runs": broken,
        "lost": sum(verdict.lost for verdict in verdicts),
        "repeated": sum(verdict.repeated for verdict in verdicts),
        "staleness_max": max(verdict.staleness_max for verdict in verdicts),
        "seeds": seeds,
        "wall_s": round(time.monotonic() - started),
    }
    if not broken:
        shutil.rmtree(folder)
    print(f"RESULT {json.dumps(result)}")
    return 1 if broken else 0


def suffer_kills(experiment: Experiment, seed: int, number: int, faults: Counter[str]) -> Verdict:
    """Kill processes of one run."""
    voice = Voice()
    print(f"seed {seed}: {experiment.allocation}, {experiment.steps} steps, {number + 1} kills", flush=True)
    plans = [kills.draw(seed, number=number, steps=experiment.steps), kills.draw_harmless(seed, steps=experiment.steps)]
    outcome = kills.run(experiment, *plans, timeout_s=TIMEOUT_S, say=voice)
    faults.update(outcome.faults)
    verdict = judge(experiment, outcome)
    for cause in outcome.causes:
        voice(f"it was started again because {cause}")
    conclude(experiment.folder, verdict, voice)
    return verdict


def suffer_servers(folder: Path, model: Path, seed: int, number: int, faults: Counter[str]) -> Verdict:
    """Let the servers of one run misbehave, kill some of its processes too, and see that the servers survive it."""
    voice = Voice()
    with fleet(folder / "fleet", model, size=2, seed=seed) as servers:
        experiment = Experiment(folder / "run", model, SERVED_ALLOCATION, server_addrs=servers.proxies)
        print(f"seed {seed}: 2 unreliable servers, {experiment.steps} steps, {number + 1} kills", flush=True)
        plan = kills.draw(seed, number=number, steps=experiment.steps, roles=("trainer", "launcher", "guard"))
        outcome = kills.run(
            experiment, plan, kills.draw_harmless(seed, steps=experiment.steps), timeout_s=TIMEOUT_S, say=voice
        )
        broken = servers.faults()
        voice(json.dumps(broken))
        faults.update(outcome.faults)
        faults.update(broken)
        outcome.num_fatal += broken[REFUSED]
        verdict = judge(experiment, outcome)
        verdict.broken += servers.complaints()
    for cause in outcome.causes:
        voice(f"it was started again because {cause}")
    conclude(folder, verdict, voice)
    return verdict


def _seeds(first: int, given: int | None, default: int) -> list[int]:
    return list(range(first, first + (default if given is None else given)))


def conclude(folder: Path, verdict: Verdict, voice: Voice) -> None:
    """Tell how a run has ended, and remove it if it was fine."""
    for text in verdict.broken:
        voice(f"BROKEN {text}")
    told = dataclasses.asdict(verdict) | {"broken": len(verdict.broken)}
    voice(json.dumps(told))
    if verdict.broken:
        voice(f"kept in {folder}")
    else:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
