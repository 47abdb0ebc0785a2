"""The seconds of a step in closed form: what the simulator finds, within a fifth, in a tenth of a millisecond.

A step is the largest of three floors: what servers can sample, what the trainer computes, and how long the longest
completions take that `bound` steps must hold. The first and the last depend on how many sequences run, which follows
from the step: the two are solved together. Optimistic where floors are close; it ranks settings.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from arealite.planner.scenario import Scenario

_NUM_GROUPS, _NUM_SAMPLES = 512, 4096  # at most, from which the moments of lengths are taken
_NUM_ROUNDS, _DAMPING = 60, 0.3


@dataclass(frozen=True)
class Moments:
    """Of the lengths of completions, in simulated tokens."""

    powers: tuple[float, ...]  # means of the first to the fourth power
    longest_of_group: float
    longest_of_batch: float


@dataclass(frozen=True)
class Step:
    """A predicted step, in seconds."""

    step_s: float
    floors: Mapping[str, float]  # `servers`, `trainer`, `stragglers`; their sum where bound is 0, else the largest
    num_tokens: float  # trained in it
    train_s: float
    publish_s: float = 0.0

    @property
    def decides(self) -> str:
        floor = max(self.floors, key=lambda name: self.floors[name])
        return "publication" if floor == "trainer" and self.publish_s > self.train_s else floor


def moments(asked: Scenario) -> Moments:
    """Draw completions of a scenario and return their moments."""
    num_groups = max(1, min(_NUM_GROUPS, _NUM_SAMPLES // asked.group))
    drawn = [[asked.lengths(prompt, sample) for sample in range(asked.group)] for prompt in range(num_groups)]
    lengths = np.array(drawn, dtype=float)
    longest = np.sort(lengths.max(axis=1))
    shares = (np.arange(num_groups + 1) / num_groups) ** asked.batch_size  # of batches with none above each of them
    powers = tuple(float((lengths**power).mean()) for power in range(1, 5))
    return Moments(powers, float(longest.mean()), float(longest @ np.diff(shares)))


def predict(asked: Scenario, lengths: Moments | None = None) -> Step:
    """Return the mean step of a scenario without failures; `lengths` are its moments, if they are known."""
    lengths, server, num_servers = lengths or moments(asked), asked.server, asked.num_servers
    grain, prompt, batch, bound = server.grain, asked.prompt, asked.batch_size, asked.bound
    step_s, sequence_s, context_s = grain * server.step_s, grain * server.sequence_s, grain**2 * server.context_s
    prefill_s, (mean, square, cube, fourth) = grain * server.prefill_s, lengths.powers
    samples, context = batch * asked.group, prompt + square / (2 * mean)  # of a running sequence, at any moment
    publish_s = asked.publish_s + asked.weight_bytes / server.bytes_per_s + server.swap_s
    num_tokens = samples * (prompt + mean)
    train_s = asked.train_s + asked.train_token_s * num_tokens
    fitting = min(server.slots, server.cache_tokens / context)

    # A batch that begins at once: what a completion adds to the seconds of its server, the spread of that sum, and the
    # slowest of the servers.
    own = sequence_s + context_s * prompt
    added_s = own * mean + context_s * square / 2 + server.request_s
    variance = own**2 * (square - mean**2) + own * context_s * (cube - mean * square)
    variance += context_s**2 / 4 * (fourth - square**2)
    each, slowest = samples / num_servers, math.sqrt(2 * math.log(num_servers))
    waves = max(1.0, each / fitting)
    whole_s = step_s * (lengths.longest_of_batch + (waves - 1) * mean) + each * added_s
    whole_s += slowest * math.sqrt(each * max(0.0, variance)) + each * prefill_s * prompt / asked.group + asked.reward_s
    trainer = train_s + publish_s
    if bound == 0:
        sampling = "servers" if each * added_s > step_s * lengths.longest_of_batch else "stragglers"
        floors = {sampling: whole_s, "trainer": trainer}
        return Step(whole_s + trainer, floors, num_tokens * grain, train_s, publish_s)

    in_flight = min(asked.concurrency or (bound + 1) * batch, (bound + 1) * batch)  # groups
    # Members of a group that ended leave their place empty until the longest one has.
    most = min(in_flight * asked.group * mean / lengths.longest_of_group / num_servers, fitting)
    running = most

    def decode_s(running: float) -> float:
        return step_s + (sequence_s + context_s * context) * running

    for _ in range(_NUM_ROUNDS):
        token_s = decode_s(running)
        refilled_s = running * context * prefill_s  # after an update that aborts
        sampled_s = samples * (mean * decode_s(most) / most + server.request_s) / num_servers + refilled_s + publish_s
        # A completion that begins at a version is due with the batch of `bound` versions later.
        latest_s = (max(whole_s, lengths.longest_of_batch * token_s + asked.reward_s) + trainer) / (bound + 1)
        floors = {"servers": sampled_s, "trainer": trainer, "stragglers": latest_s}
        whole = max(floors.values())
        needed = samples * mean * token_s / num_servers / whole
        running += _DAMPING * (min(most, needed) - running)
    return Step(whole, floors, num_tokens * grain, train_s, publish_s)
