"""How far off `arealite simulate` is: one run is measured, and what was learned from it predicts others.

    python benchmarks/simulate_validate.py [--rounds 3] [--steps 30] [--only bound=0] [--max-load 2]
        [--json] [--out FILE]

The loop, model and long-tailed lengths are those of async_vs_sync.py: an embedded server and a trainer, each a process
with one thread. The run with a staleness bound of 2 and 4 batches in flight is learned from; the others have another
bound, concurrency, size of groups, or a second server, which then shares two cores with the first one and the trainer.
Every setting is measured in every round, on the same completions, after a run that warms up server and trainer. A round
predicts its own runs, as machines are not equally fast all the time, and the median error counts. Batches take turns in
waiting for long completions, so few steps say little: the rate is that of `steps` steps after the first six. Exit
status 1: a prediction is more than 15 % off; with more servers than other cores it is shown and not judged. A machine
that does something else measures that: above `--max-load` nothing starts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from async_vs_sync import Case, GivenLengths, batches, configured, make_actor, served, timed
from circumstances import options, report

from arealite.api.cli_args import GRPOConfig
from arealite.api.run_folder import RunFolder
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.planner.cost import scenario
from arealite.planner.scenario import Scenario
from arealite.simulate.run import simulate
from arealite.simulate.workload import learned, measured
from arealite.utils.hf import load_hf_tokenizer
from arealite.weights.publish import publish_weights

MOST_OFF = 0.15
WARM_UP = 6
LEARNED = "learned from"
SETTINGS: dict[str, dict[str, int]] = {
    LEARNED: {},
    "bound=0": {"bound": 0},
    "bound=1": {"bound": 1},
    "bound=4": {"bound": 4},
    "concurrency=8": {"concurrency": 8},
    "concurrency=16": {"concurrency": 16},
    "group=8": {"group": 8},
    "servers=2": {"servers": 2},
}


def main() -> int:
    """Measure all settings, predict them from one, and return 1 if a prediction is too far off."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of all settings")
    parser.add_argument("--steps", type=int, default=30, help="measured of each run")
    parser.add_argument("--only", choices=[name for name in SETTINGS if name != LEARNED], help="predict only this one")
    parser.add_argument("--max-load", type=float, default=2.0, help="of the machine before it starts")
    args = parser.parse_args()
    if (load := os.getloadavg()[0]) > args.max_load:
        print(
            f"load must be at most {args.max_load:g}: got {load:.2f}. Wait until the machine is quiet.", file=sys.stderr
        )
        return 2
    torch.set_num_threads(1)
    names = [name for name in SETTINGS if args.only in (None, name) or name == LEARNED]
    with tempfile.TemporaryDirectory() as folder:
        return validate(args, folder, names)


def validate(args: argparse.Namespace, folder: str, names: Sequence[str]) -> int:
    """Measure settings in turn, and report each beside what the first one predicts in the same rounds."""
    model = f"{folder}/model"
    found: dict[str, list[tuple[GRPOConfig, RunFolder]]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(served(model))[0]]
        if any("servers" in SETTINGS[name] for name in names):
            addresses.append(stack.enter_context(served(model))[0])
        actor = make_actor(model)
        train(*setting(folder, addresses, "cold"), actor, 0)
        for number in range(args.rounds):
            for name in names:
                config, case = setting(
                    folder, addresses, f"{name}-{number}".replace(" ", "-").replace("=", "-"), **SETTINGS[name]
                )
                found[name].append((config, train(config, case, actor, args.steps)))
        actor.destroy()
    costs, worst = [learned(run, config, 1) for config, run in found[LEARNED]], 0.0
    for name in names:
        rates = [1 / measured(run)[1][WARM_UP:].mean() for _, run in found[name]]
        config, case = setting(folder, addresses, "predicted", **SETTINGS[name])
        predictions = [predicted(one, config, case, args.steps) for one in costs]
        error = statistics.median(one / rate for one, rate in zip(predictions, rates, strict=True)) - 1
        is_judged = SETTINGS[name].get("servers", 1) < (os.cpu_count() or 1)
        worst = max(worst, abs(error) * is_judged)
        result = {
            "case": name,
            "measured": statistics.median(rates),
            "spread": max(rates) / min(rates) - 1,
            "predicted": statistics.median(predictions),
            "error": error,
            "is_judged": is_judged,
        }
        report(args, result, described)
    return int(worst > MOST_OFF)


def predicted(costs: Scenario, config: GRPOConfig, case: Case, steps: int) -> float:
    """Return the steps per second of a config at costs that were learned."""
    result = simulate(same_completions(scenario(config, costs, steps=steps, warm_up=WARM_UP, seed=1), case))
    return len(result.step_s) / result.seconds


def same_completions(asked: Scenario, case: Case) -> Scenario:
    """Return a scenario with the prompts of the measured runs, in their order."""
    groups = [row["lengths"] for batch in batches(case) for row in batch]
    grain = asked.server.grain
    return replace(asked, lengths=lambda prompt, sample: -(-groups[prompt % len(groups)][sample] // grain))


def setting(
    folder: str,
    addresses: list[str],
    trial: str,
    *,
    bound: int = 2,
    concurrency: int = 32,
    group: int = 4,
    servers: int = 1,
) -> tuple[GRPOConfig, Case]:
    """Return the config and the lengths of a setting."""
    case = Case("long-tail", sigma=1.0, group=group)
    keys = {
        "cluster.fileroot": folder,
        "trial_name": trial,
        "gconfig.max_new_tokens": case.max_tokens,
        "rollout.max_head_offpolicyness": bound,
        "rollout.max_concurrent_rollouts": concurrency,
        "rollout.num_servers": servers,
        "rollout.server_addrs": f"[{','.join(addresses[:servers])}]",
    }
    return configured(f"{folder}/model", *(f"{key}={value}" for key, value in keys.items()), case=case), case


def train(config: GRPOConfig, case: Case, actor: FSDPPPOActor, steps: int) -> RunFolder:
    """Train some steps, and write what a run leaves of them."""
    rollout, run = RemoteInferenceEngine(config.rollout), RunFolder(config)
    rollout.initialize(None, None)
    workflow = GivenLengths(case, config.gconfig, load_hf_tokenizer(config.tokenizer_path))
    rows, loader, version = [], batches(case), actor.get_version()
    try:
        actor.set_version(0)
        publish_weights(actor, rollout, version=0)
        rollout.metrics()
        for step in range(WARM_UP + steps):
            spent, began = Counter[str](), time.perf_counter()
            with timed(spent, "rollout"):
                batch = rollout.prepare_batch(loader, workflow)
            if config.actor.proximal == "recompute":
                batch["proximal_logprobs"] = actor.compute_logprobs(batch)
            actor.compute_advantages(batch)
            actor.ppo_update(batch)
            with timed(spent, "weights"):
                publish_weights(actor, rollout, version=step + 1)
            rows.append(row(step, time.perf_counter() - began, spent, batch, rollout.metrics()))
    finally:
        rollout.destroy()
        actor.set_version(version)
    run.metrics.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return run


def row(step: int, step_s: float, spent: Counter[str], batch: Any, metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics of a step that predictions are made from."""
    sampled, num_tokens = batch["loss_mask"].bool(), int(batch["attention_mask"].sum())
    staleness = (step - batch["versions"])[sampled].float()
    return {
        "step": step,
        "time/step_s": step_s,
        "time/rollout_s": spent["rollout"],
        "time/weights_s": spent["weights"],
        "weights/pause_s": metrics["weights/pause_s"],
        "perf/processed_tokens": num_tokens,
        "rollout/prompt_tokens": (num_tokens - int(sampled.sum())) / len(sampled),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": float(staleness.max()),
    }


def described(result: dict[str, Any]) -> str:
    """Return a line of the table."""
    note = "" if result["is_judged"] else ", not judged"
    return (
        f"{result['case']:15} measured {result['measured']:.3f} steps/s (spread {result['spread']:.0%})  "
        f"predicted {result['predicted']:.3f}  error {result['error']:+.1%}{note}"
    )


if __name__ == "__main__":
    sys.exit(main())
