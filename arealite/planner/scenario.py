"""What is predicted: the work of a run, and what servers and trainer take for it. The simulator runs it, and
`planner/predict.py` has a closed form."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ServerProfile:
    """What a server costs, in seconds; a simulated token stands for `grain` tokens."""

    step_s: float = 0.008  # per decode step
    sequence_s: float = 2e-5  # per running sequence and step
    context_s: float = 1e-8  # per token in the caches and step
    prefill_s: float = 2e-5  # per prompt token
    request_s: float = 0.0  # per request, before its prefill
    slots: int = 256
    cache_tokens: float = math.inf
    grain: int = 1
    bytes_per_s: float = 2e10  # of a weight update
    swap_s: float = 0.2  # to take new weights into use
    round_trip_s: float = 0.0005


@dataclass(frozen=True)
class GroupLengths:
    """Completions as long as those of a run. A prompt gets a whole group, as lengths within a group are alike; a larger
    group also takes samples from the group with the next mean."""

    tokens: Sequence[int]  # of group after group, in the order of their means
    group: int
    seed: int = 1

    def __call__(self, prompt: int, sample: int) -> int:
        rank = random.Random(f"{self.seed}/{prompt}").randrange(len(self.tokens) // self.group)
        return self.tokens[(rank * self.group + sample) % len(self.tokens)]


@dataclass(frozen=True)
class Scenario:
    """What is simulated. Times are in seconds; tokens are simulated ones, see `ServerProfile.grain`."""

    num_servers: int = 2
    server: ServerProfile = field(default_factory=ServerProfile)
    batch_size: int = 32  # prompts
    group: int = 8
    bound: int = 2
    concurrency: int | None = None  # prompts; None is as many as the bound admits
    lengths: Callable[[int, int], int] = GroupLengths((64,), 1)  # by number of the prompt and of the sample
    max_new_tokens: int = 512
    prompt: int = 8
    publish_s: float = 0.0  # before the servers take part
    train_s: float = 0.1
    train_token_s: float = 1e-5  # per token of the batch
    reward_s: float = 0.0
    weight_bytes: float = 1e8
    num_buckets: int = 4
    steps: int = 20
    warm_up: int = 5  # steps that are not measured
    rejected_share: float = 0.0  # of groups, by a filter
    slow_share: float = 0.0  # of servers
    mean_life_s: float = math.inf  # of one server
    restart_s: float = 120.0
    hang_share: float = 0.0  # of deaths
    seed: int = 1
    rollout: dict[str, Any] = field(default_factory=dict)  # other keys of `rollout`
