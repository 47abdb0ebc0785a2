"""Scenarios of simulated runs that tests share."""

import math
import random
from typing import Any

from testing_simulated import lognormal_lengths

from arealite.planner.scenario import Scenario, ServerProfile

GRAIN = 256
H100 = ServerProfile(  # a 1.7B model on one GPU
    step_s=0.00177,
    sequence_s=7.16e-6,
    context_s=4.56e-8,
    prefill_s=6.96e-6,
    slots=256,
    cache_tokens=571_600 / GRAIN,
    grain=GRAIN,
    bytes_per_s=3e10,
    round_trip_s=0.001,
)


def h100s(num_servers: int, **changes: Any) -> Scenario:
    """Return a run of so many servers and a third as many GPUs that train, with answers of up to 31,744 tokens."""
    usual: dict[str, Any] = {
        "server": H100,
        "num_servers": num_servers,
        "batch_size": 8 * num_servers // 3,
        "concurrency": 8 * num_servers,
        "group": 16,
        "lengths": lognormal_lengths(8192 / GRAIN, 0.9, 31744 // GRAIN),
        "max_new_tokens": 31744 // GRAIN,
        "prompt": 4,
        "train_s": 1.0,
        "train_token_s": 0.0014 * 24 / num_servers,
        "publish_s": 0.3,
        "weight_bytes": 3.44e9,
        "num_buckets": 3,
    }
    return Scenario(**usual | changes)


def random_scenario(seed: int) -> Scenario:
    """Return a small run in which anything may be slow, die or be rejected."""
    draw = random.Random(seed)
    server = ServerProfile(step_s=0.01, sequence_s=2e-4, slots=draw.choice([2, 8, 256]), swap_s=draw.choice([0.0, 1.0]),
                           cache_tokens=draw.choice([math.inf, 2000.0]))  # fmt: skip
    rollout = {"overdue": draw.choice(["wait", "drop"]), "weight_update_timeout": draw.choice([5.0, 20.0])}
    rollout |= {"episode_retries": draw.choice([0, 3]), "max_rejected_in_a_row": 10**6, "max_failed_share": 1.0}
    return Scenario(
        num_servers=draw.choice([1, 2, 3, 5, 8]),
        server=server,
        batch_size=draw.choice([1, 2, 4, 8]),
        group=draw.choice([1, 2, 4]),
        bound=draw.choice([0, 1, 2, 4]),
        concurrency=draw.choice([None, 1, 3, 8, 32]),
        lengths=lognormal_lengths(draw.choice([4, 32, 64]), draw.choice([0.0, 1.0, 2.0]), 512),
        train_s=draw.choice([0.0, 0.5, 5.0]),
        rejected_share=draw.choice([0.0, 0.0, 0.5]),
        slow_share=draw.choice([0.0, 0.3]),
        mean_life_s=draw.choice([math.inf, 100.0, 20.0]),
        hang_share=draw.choice([0.0, 0.5, 1.0]),
        restart_s=draw.choice([1.0, 20.0, 100.0]),
        reward_s=draw.choice([0.0, 2.0]),
        seed=seed,
        steps=4,
        warm_up=2,
        rollout=rollout,
    )
