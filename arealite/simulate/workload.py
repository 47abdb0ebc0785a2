"""Scenarios of a config: what it asks of servers and trainer, and what these take for it, learned from a run that did
such work (its ledger and metrics) or estimated for a GPU.

What was learned holds for the run's lengths, model and machines, shared as they were. The staleness bound,
concurrency, batch and number of servers may differ, and with less certainty the size of groups.
"""

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml

from arealite.api.cli_args import GRPOConfig
from arealite.api.errors import require
from arealite.api.run_folder import RunFolder
from arealite.planner.memory import ModelShape, kv_bytes_per_token
from arealite.rollout.account.ledger import open_for_reading
from arealite.simulate.run import Scenario
from arealite.simulate.servers import ServerProfile
from arealite.utils.files import read_jsonl, reading

_MAX_TOKENS = 256  # of a simulated completion: one simulated token stands for several of a longer one
_SLOTS = 256  # of a server whose config does not say
_NUM_DRAWN = 10_000  # lognormal lengths
_NUM_LOOKS = 20  # at what runs beside a sample
_NUM_FITS = 4  # each weighs samples by the seconds that the one before expects
_WARM_UP = 2  # steps of a run that do not count
_KEPT = ("overdue", "episode_timeout", "episode_retries", "request_timeout", "weight_update_timeout")
_COLUMNS = ("time/step_s", "time/rollout_s", "time/weights_s", "time/eval_s", "weights/pause_s",
            "perf/processed_tokens", "rollout/prompt_tokens", "staleness/mean", "staleness/max")  # fmt: skip
_SAMPLES = """SELECT ticket, head_version, prompts.latency_s, tokens, samples.latency_s, num_interrupts, server
FROM prompts JOIN samples USING (ticket) WHERE is_counted AND attempt = 0 AND state IN ('accepted', 'trained')
ORDER BY ticket, sample"""
PROFILES = Path(__file__).with_name("gpus.yaml")


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


def measured(run: RunFolder) -> tuple[dict[str, float], Any]:
    """Return what a run measured of a mean step, without evaluations, and the seconds of each step. Raises ConfigError
    if there are fewer than three with rollouts."""
    with reading(run.metrics):
        rows = [row for row in read_jsonl(run.metrics) if "time/rollout_s" in row]
    require(len(rows) > _WARM_UP, f"{run.path} must have 3 steps with rollouts: got {len(rows)}. Let it run longer.")
    table = np.array([[row.get(key) or 0.0 for key in _COLUMNS] for row in rows], dtype=float)
    step_s, rollout_s, weights_s, eval_s, pause_s, num_tokens, prompt, staleness, _ = table[_WARM_UP:].mean(0).tolist()
    step_s -= eval_s
    return {
        "step_s": step_s,
        "tokens_per_s": num_tokens / step_s,
        "rollout": rollout_s / step_s,
        "train": 1 - (rollout_s + weights_s) / step_s,
        "weights": weights_s / step_s,
        "staleness": staleness,
        "max_staleness": int(table[_WARM_UP:, -1].max()),
        "pause_s": pause_s,
        "prompt": prompt,
    }, table[:, 0]


def scenario(config: GRPOConfig, costs: Scenario, **options: Any) -> Scenario:
    """Return what a config asks for at costs in tokens of the model and for one rank of the trainer; `options` are
    other fields of a scenario."""
    rollout, longest = config.rollout, config.gconfig.max_new_tokens
    grain, lengths = -(-longest // _MAX_TOKENS), cast("GroupLengths", costs.given_lengths)
    keys = {name: getattr(rollout, name) for name in _KEPT} | {"seed": options["seed"]}
    keys["pause_mode"] = "abort" if rollout.pause_mode == "abort" else "retract"
    return replace(
        costs,
        num_servers=rollout.num_servers or 1,
        server=replace(costs.server, grain=grain, cache_tokens=costs.server.cache_tokens / grain),
        batch_size=config.train_dataset.batch_size,
        group=config.gconfig.n_samples,
        bound=rollout.max_head_offpolicyness,
        concurrency=rollout.max_concurrent_rollouts,
        given_lengths=lambda prompt, sample: max(1, round(min(longest, lengths(prompt, sample)) / grain)),
        max_new_tokens=-(-longest // grain),
        prompt=max(2, round(costs.prompt / grain)),
        train_token_s=costs.train_token_s * grain / _num_ranks(config),
        rollout=keys,
        **options,
    )


def load_gpu(name: str) -> dict[str, float]:
    """Return a profile by its name in gpus.yaml, or from a file with the same keys. Raises ConfigError or FileError."""
    known, file = yaml.safe_load(PROFILES.read_text(encoding="utf-8")), Path(name)
    names = sorted(known.keys() - {"usual"})
    if name in names:
        return dict(known[name])
    require(file.is_file(), f"--gpu must be {', '.join(names)} or a file: got {name}. Copy a profile of {PROFILES}.")
    with reading(file, yaml.YAMLError):
        found = {key: float(value) for key, value in yaml.safe_load(file.read_text(encoding="utf-8")).items()}
    wrong = sorted(known["h100"].keys() ^ found.keys())
    require(not wrong, f"{name} must have the keys of a profile and no other: got {wrong} wrong. See {PROFILES}.")
    return found


def server_profile(shape: ModelShape, gpu: Mapping[str, float], *, num_gpus: int, slots: int) -> ServerProfile:
    """Return what a server of so many GPUs costs. A decode step reads all weights and caches once."""
    flops, bandwidth = _flops_per_token(shape) / num_gpus, gpu["bandwidth"] * gpu["decode_bandwidth"]
    reduced = 2 * shape.num_layers * (num_gpus > 1)  # blocks whose outputs a server's GPUs sum
    kv_bytes = kv_bytes_per_token(shape, value_bytes=1, gpus=num_gpus) * gpu["value_bytes"]
    weights = shape.num_parameters * gpu["value_bytes"] / num_gpus
    free = gpu["server_share"] * gpu["memory"] - gpu["other_bytes"] - weights
    require(free > 0, f"a server's weights must fit its GPUs: got {-free / 1e9:.1f} GB too many on each. Raise t.")
    return ServerProfile(
        step_s=flops / 2 * gpu["value_bytes"] / bandwidth + gpu["step_s"] + reduced * gpu["all_reduce_s"],
        sequence_s=flops / (gpu["flops"] * gpu["decode_flops"]) / 2  # half of it passes while weights are read
        + gpu["sequence_s"]
        + reduced * 2 * shape.hidden * gpu["value_bytes"] / gpu["link"],
        context_s=kv_bytes / bandwidth,
        prefill_s=flops / (gpu["flops"] * gpu["prefill_flops"]),
        request_s=gpu["request_s"],
        slots=slots,
        cache_tokens=free / kv_bytes,
        bytes_per_s=gpu["network"] * gpu["network_share"],
        swap_s=gpu["swap_s"],
        round_trip_s=0.001,
    )


def _flops_per_token(shape: ModelShape) -> float:
    """Return the operations of a forward pass without attention: two per parameter, but for a lookup."""
    return 2.0 * (shape.num_parameters - (0 if shape.is_tied else shape.vocab * shape.hidden))


def lognormal(lengths: Sequence[float], seed: int) -> Scenario:
    """Return work that costs nothing yet: prompts of so many tokens, completions with this mean and sigma."""
    prompt, mean, sigma = lengths
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, _NUM_DRAWN)
    return Scenario(given_lengths=GroupLengths(drawn.round().astype(int).tolist(), 1, seed), prompt=round(prompt))


def estimated(config: GRPOConfig, shape: ModelShape, gpu: Mapping[str, float], work: Scenario) -> Scenario:
    """Return what work of known lengths costs on GPUs of a kind."""
    actor, lengths = config.actor, cast("GroupLengths", work.given_lengths)
    mean = float(np.mean([lengths(prompt, 0) for prompt in range(_NUM_DRAWN)]))
    flops = _flops_per_token(shape) + 2 * shape.num_layers * shape.num_heads * shape.head_dim * (work.prompt + mean / 2)
    num_passes = (4 if actor.gradient_checkpointing else 3) + (actor.proximal == "recompute") + config.has_reference
    num_gpus = config.allocation.gen_tp_size if config.allocation else 1
    return replace(
        work,
        server=server_profile(shape, gpu, num_gpus=num_gpus, slots=_slots(config)),
        train_s=gpu["train_s"],
        train_token_s=flops * num_passes / (gpu["flops"] * gpu["mfu"]) + gpu["train_token_s"],
        publish_s=gpu["publish_s"],
        weight_bytes=shape.num_parameters * gpu["value_bytes"],
    )


def learned(run: RunFolder, config: GRPOConfig, seed: int) -> Scenario:
    """Return what a run that has this config, finished or not, took for its work, and the lengths of its groups.

    Constants of a decode step come from the seconds of samples against what ran beside them.
    """
    mean, seconds_of_steps = measured(run)
    counts, seconds, reward_s = _samples(run, config, seconds_of_steps)
    step_s, sequence_s, request_s, _ = _fitted(counts, seconds)
    pause_s = mean["pause_s"]
    lengths = counts[:, 0].astype(int).reshape(-1, config.gconfig.n_samples)
    return Scenario(
        server=ServerProfile(step_s, sequence_s, 0.0, 0.0, request_s, _slots(config), bytes_per_s=1e12, swap_s=pause_s),
        given_lengths=GroupLengths(lengths[lengths.mean(1).argsort()].ravel().tolist(), lengths.shape[1], seed),
        prompt=round(mean["prompt"]),
        train_s=0.0,
        train_token_s=mean["train"] / mean["tokens_per_s"] * _num_ranks(config),
        publish_s=max(0.0, mean["weights"] * mean["step_s"] - pause_s),
        reward_s=reward_s,
        weight_bytes=1.0,
    )


def _num_ranks(config: GRPOConfig) -> int:
    return max(1, config.allocation.train_world_size) if config.allocation else 1


def _slots(config: GRPOConfig) -> int:
    return config.lite.slots if config.rollout.backend == "lite" else _SLOTS


def _samples(run: RunFolder, config: GRPOConfig, step_s: Any) -> tuple[Any, Any, float]:
    """Return of each sample its tokens, these times the sequences that ran beside it, the requests that its server took
    meanwhile, and its interruptions; the seconds since it got a slot; and the mean seconds of rewards.

    The ledger has durations, not times: an episode began when the version was published that it counts from, or, above
    the concurrency, when the first one that ran had ended.
    """
    with open_for_reading(run.ledger) as database, reading(run.ledger):
        rows = database.execute(_SAMPLES).fetchall()
    size, slots = config.gconfig.n_samples, _slots(config)
    sizes = {int(number) for number in np.unique([row[0] for row in rows], return_counts=True)[1]}
    problem = f"groups of {run.path} must have gconfig.n_samples = {size} completions: got {sorted(sizes)}"
    require(sizes == {size}, f"{problem}. Runs of several turns can't be simulated: give a config and --gpu.")
    _, heads, episodes_s, tokens, latencies_s, interrupts = np.array([row[:-1] for row in rows], dtype=float).T
    servers = np.array([row[-1] for row in rows])
    published = np.append(0.0, np.cumsum(step_s))
    most = config.rollout.concurrency
    ends_of_episodes, starts_of_episodes = [0.0] * most, []
    for head, seconds in zip(heads[::size].astype(int).clip(max=len(step_s)), episodes_s[::size], strict=True):
        starts_of_episodes.append(max(published[head], ends_of_episodes[0]))
        heapq.heapreplace(ends_of_episodes, starts_of_episodes[-1] + seconds)
    begins = np.repeat(starts_of_episodes, size)
    ends, beside, taken, seconds = begins + latencies_s, *np.zeros((3, len(rows)))
    for server in np.unique(servers):
        mine = np.flatnonzero(servers == server)
        mine = mine[begins[mine].argsort(kind="stable")]
        freed = np.append(np.zeros(slots), np.sort(ends[mine]))[: len(mine)]  # when each gets a slot, first come first
        starts = np.minimum(np.maximum(begins[mine], freed), ends[mine])
        seconds[mine] = np.maximum(ends[mine] - starts, 1e-9)
        at, begun, ended = np.linspace(starts, ends[mine], _NUM_LOOKS), np.sort(starts), np.sort(ends[mine])
        beside[mine] = (np.searchsorted(begun, at, "right") - np.searchsorted(ended, at)).mean(0)
        taken[mine] = np.searchsorted(begun, ends[mine], "right") - np.searchsorted(begun, starts)
    reward_s = float((episodes_s - latencies_s).reshape(-1, size).min(1).mean())
    return np.stack([tokens, tokens * beside, taken, interrupts], axis=1), seconds, max(0.0, reward_s)


def _fitted(counts: Any, seconds: Any) -> list[float]:
    """Return the seconds of one of each that fit best and are not negative. Deviations add up over time and come from
    stalls: their variance grows with the seconds expected, so that the seconds explained add up to those observed."""
    expected = seconds
    for _ in range(_NUM_FITS):
        weights, kept = 1 / np.sqrt(np.maximum(expected, 1e-3)), np.arange(counts.shape[1])
        while (best := np.linalg.lstsq(counts[:, kept] * weights[:, None], seconds * weights)[0]).min() < 0:
            kept = np.delete(kept, best.argmin())
        found = np.bincount(kept, best, counts.shape[1])
        expected = counts @ found
    return cast("list[float]", found.tolist())
