"""Run folders of simulated runs: their own ledger, and metrics of which every constant is known."""

import json
from pathlib import Path

import numpy as np

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.api.config.loader import to_yaml
from arealite.api.run_folder import RunFolder
from arealite.planner.scenario import GroupLengths, Scenario, ServerProfile
from arealite.simulate.run import Simulation

CONFIG = Path(__file__).parents[1] / "examples" / "arealite" / "configs" / "gsm8k_grpo_cpu.yaml"
SERVER = ServerProfile(
    step_s=0.01, sequence_s=1e-3, context_s=0.0, prefill_s=0.0, request_s=0.004, slots=64, swap_s=0.1, round_trip_s=0.0
)
KEYS = ("actor.path=/model", "gconfig.n_samples=4", "gconfig.max_new_tokens=128", "train_dataset.batch_size=4",
        "rollout.max_concurrent_rollouts=12", "lite.slots=64")  # fmt: skip


def lognormal_lengths(mean: float, sigma: float, most: int) -> GroupLengths:
    """Return completions of lognormal length, cut at `most` tokens."""
    drawn = np.random.default_rng(1).lognormal(np.log(mean) - sigma**2 / 2, sigma, 10_000)
    return GroupLengths(drawn.round().clip(1, most).astype(int).tolist(), 1)


def write_simulated(folder: Path) -> tuple[RunFolder, GRPOConfig, float]:
    """Write what a simulated run of two servers leaves, and return it with its config and the seconds of its steps."""
    keys = (*KEYS, "allocation_mode=lite.d2+d1", f"cluster.fileroot={folder}")
    names = ("experiment_name=simulated", "trial_name=simulated")
    config, _ = load_expr_config(["--config", str(CONFIG), *keys, *names], GRPOConfig)
    scenario = Scenario(
        num_servers=2,
        server=SERVER,
        batch_size=4,
        group=4,
        concurrency=12,
        lengths=lognormal_lengths(40, 0.8, 128),
        max_new_tokens=128,
        publish_s=0.2,
        train_s=0.0,
        train_token_s=1e-3,
        reward_s=0.05,
        weight_bytes=8.0,
        num_buckets=1,
        steps=30,
        warm_up=0,
        rollout={"fileroot": str(folder)},
    )
    result, run = Simulation(scenario).run(), RunFolder(config)
    assert result.failure is None
    rows = [
        {
            "step": step,
            "time/step_s": ended - begun,
            "time/rollout_s": waited - begun,
            "time/weights_s": ended - trained,
            "weights/pause_s": 0.1,
            "perf/processed_tokens": round((trained - waited) / scenario.train_token_s),
            "rollout/prompt_tokens": scenario.prompt,
            "staleness/mean": 1.0,
            "staleness/max": 2.0,
        }
        for step, (begun, waited, trained, ended) in enumerate(result.moments)
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.config.write_text(to_yaml(config))
    return run, config, sum(result.step_s[4:]) / len(result.step_s[4:])
