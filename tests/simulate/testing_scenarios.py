"""Scenarios of simulated runs that tests share."""

from typing import Any

from arealite.simulate.run import LognormalLengths, Scenario
from arealite.simulate.servers import ServerProfile

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
        "lengths": LognormalLengths(8192 / GRAIN, 0.9, 31744 // GRAIN),
        "max_new_tokens": 31744 // GRAIN,
        "prompt": 4,
        "train_s": 1.0,
        "train_token_s": 0.0014 * 24 / num_servers,
        "publish_s": 0.3,
        "weight_bytes": 3.44e9,
        "num_buckets": 3,
    }
    return Scenario(**usual | changes)
