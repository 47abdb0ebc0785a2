"""Kills processes of real runs at random moments, puts broken servers in front of others, and lets agents misbehave.

    PYTHONPATH=tests python -m chaos [--short] [--seed N] [--runs N] [--faulty N] [--agents N] [--folder DIR]

Prints what it does, and at last `RESULT {json}`. Exit status: 0 when every run has kept every promise, else 1, and
then the folders of the runs that have not are kept and named.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from harness.report import conclude, make_folder, print_result, say, seconds

from chaos import kills
from chaos.agent_promises import judge_agents
from chaos.agents import PLANS
from chaos.experiment import AGENT_ENTRY, WORD_PROBLEMS, Experiment
from chaos.flaky_proxy import REFUSED
from chaos.fleet import fleet
from chaos.kills import Outcome
from chaos.promises import Verdict, judge

ALLOCATIONS = ("lite.d1p1t1+d2p1t1", "lite.d2p1t1+d1p1t1")
SERVED_ALLOCATION = "lite.d2p1t1+d1p1t1"
TIMEOUT_S = 1800.0
"""Of a run that hangs; one under fire takes a minute or two."""


def main() -> int:
    """Run everything and print the result."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a form of less than 3 minutes on 2 cores")
    parser.add_argument("--seed", type=int, default=1, help="of the first run of both sorts; the others count on")
    parser.add_argument("--runs", type=int, help="runs whose processes are killed; default 10, or 2")
    parser.add_argument("--faulty", type=int, help="runs whose servers are unreliable; default 3, or 1")
    parser.add_argument("--agents", type=int, default=1, help="runs of agents that misbehave; default 1")
    parser.add_argument("--folder", type=Path, help="where to work; default is the temporary folder")
    args = parser.parse_args()
    suite = Suite(*make_folder("chaos", args.folder))
    num_runs, num_faulty = (2, 1) if args.short else (10, 3)
    for seed in range(args.seed, args.seed + (num_runs if args.runs is None else args.runs)):
        suite.kill_processes(seed, number=2 if args.short else 3)
    for seed in range(args.seed, args.seed + (num_faulty if args.faulty is None else args.faulty)):
        suite.serve_badly(seed, number=0 if args.short else 2)
    for seed in range(args.seed, args.seed + args.agents):
        suite.run_agents(seed, steps=4 if args.short else 12)
    result = suite.result()
    if not (is_broken := result["broken_runs"] > 0):
        shutil.rmtree(suite.folder)
    return print_result(result, is_broken=is_broken)


class Suite:
    """Runs under fire, one after the other, and what came of them."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self._model = model
        self._faults: Counter[str] = Counter()
        self._verdicts: dict[str, Verdict] = {}
        self._agents: Counter[str] = Counter()

    def kill_processes(self, seed: int, *, number: int) -> None:
        """Kill `number` processes of a run that can't do without them, and a reward worker."""
        experiment = Experiment(
            self.folder / f"kills-{seed}",
            self._model,
            allocation=ALLOCATIONS[seed % 2],
            weight_update="disk" if seed // 2 % 2 else "broadcast",
            checkpoint_steps=1 + seed % 3,
        )
        say(
            f"seed {seed}: {experiment.allocation}, weights by {experiment.weight_update}, a checkpoint every "
            f"{experiment.checkpoint_steps} steps, {number + 1} kills"
        )
        plans = kills.draw(seed, number=number), kills.draw_one(seed, "reward")
        outcome = kills.run(experiment, *plans, timeout_s=TIMEOUT_S)
        self._conclude(experiment.folder, outcome, judge(experiment, outcome))

    def serve_badly(self, seed: int, *, number: int) -> None:
        """Let servers that the run did not start misbehave, kill one of them and `number` processes of the run, and see
        that they are in order afterwards."""
        say(f"seed {seed}: 2 unreliable servers, {number + 2} kills")
        folder = self.folder / f"servers-{seed}"
        with fleet(folder / "fleet", self._model, size=2, seed=seed) as servers:
            experiment = Experiment(folder / "run", self._model, SERVED_ALLOCATION, server_addrs=servers.proxies)
            plans = [kills.draw_one(seed, "reward"), kills.draw_one(seed, "foreign_server")]
            plans.append(kills.draw(seed, number=number, roles=("trainer", "launcher", "guard")))
            outcome = kills.run(experiment, *plans, timeout_s=TIMEOUT_S)
            faults = servers.faults()
            say(f"proxies: {json.dumps(faults)}")
            outcome.faults += faults.elements()
            outcome.num_fatal += faults[REFUSED]
            verdict = judge(experiment, outcome)
            verdict.broken += servers.complaints()
        self._conclude(folder, outcome, verdict)

    def run_agents(self, seed: int, *, steps: int) -> None:
        """Train agents that crash, hang, lie, leave and ask again, through unreliable servers, one of which dies."""
        say(f"seed {seed}: agents that misbehave, 2 unreliable servers, 1 kill")
        folder = self.folder / f"agents-{seed}"
        with fleet(folder / "fleet", self._model, size=2, seed=seed, refuses=False) as servers:
            overrides = {
                # An epoch has every plan of the agents three times.
                "train_dataset.path": f"{WORD_PROBLEMS}?train={3 * len(PLANS)}&test=2",
                "rollout.episode_timeout": 8,
                "rollout.max_failed_share": 1.0,
            }
            experiment = Experiment(
                folder / "run",
                self._model,
                SERVED_ALLOCATION,
                servers.proxies,
                steps=steps,
                group_size=2,
                num_idle=Experiment.batch_size - 1,
                entry=AGENT_ENTRY,
                overrides=overrides,
            )
            kill = kills.draw_one(seed, "foreign_server", steps=steps)
            outcome = kills.run(experiment, kill, timeout_s=TIMEOUT_S)
            outcome.faults += servers.faults().elements()
            verdict = judge(experiment, outcome)
            counts: Counter[str] = Counter()
            verdict.broken += [*judge_agents(experiment, counts), *servers.complaints()]
        say(f"agents: {json.dumps(counts)}")
        self._agents += counts
        self._conclude(folder, outcome, verdict)

    def result(self) -> dict[str, Any]:
        """Return what the last line tells."""
        verdicts = self._verdicts.values()
        return {
            "faults": dict(sorted(self._faults.items())),
            "runs": len(verdicts),
            "broken_runs": sum(bool(verdict.broken) for verdict in verdicts),
            "lost": sum(verdict.lost for verdict in verdicts),
            "repeated": sum(verdict.repeated for verdict in verdicts),
            "staleness_max": max((verdict.staleness_max for verdict in verdicts), default=-1),
            "agents": self._agents,
            "seeds": list(self._verdicts),
            "wall_s": round(seconds()),
        }

    def _conclude(self, folder: Path, outcome: Outcome, verdict: Verdict) -> None:
        """Tell how a run has ended, and remove it if it was fine."""
        self._faults.update(outcome.faults)
        self._verdicts[folder.name] = verdict
        for cause in outcome.causes:
            say(f"it had to start again: {cause}")
        say(
            f"lost {verdict.lost}, repeated {verdict.repeated}, staleness at most {verdict.staleness_max}, "
            f"prompts {json.dumps(verdict.states)}"
        )
        conclude(verdict.broken, folder)


if __name__ == "__main__":
    sys.exit(main())
