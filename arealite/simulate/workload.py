"""What a run took for its work, by its ledger and metrics: the costs of a scenario.

They hold for the run's lengths, model and machines, shared as they were. The staleness bound, concurrency, batch and
number of servers may differ, and with less certainty the size of groups.
"""

import heapq
from typing import Any, cast

import numpy as np

from arealite.api.cli_args import GRPOConfig
from arealite.api.errors import require
from arealite.api.run_folder import RunFolder
from arealite.planner.cost import num_ranks_of, slots_of
from arealite.planner.scenario import GroupLengths, Scenario, ServerProfile
from arealite.rollout.account.ledger import open_for_reading
from arealite.utils.files import read_jsonl, reading

_NUM_LOOKS = 20  # at what runs beside a sample
_NUM_FITS = 4  # each weighs samples by the seconds that the one before expects
_WARM_UP = 2  # steps of a run that do not count
_COLUMNS = ("time/step_s", "time/rollout_s", "time/weights_s", "time/eval_s", "weights/pause_s",
            "perf/processed_tokens", "rollout/prompt_tokens", "staleness/mean", "staleness/max")  # fmt: skip
_SAMPLES = """SELECT ticket, head_version, prompts.latency_s, tokens, samples.latency_s, num_interrupts, server
FROM prompts JOIN samples USING (ticket) WHERE is_counted AND attempt = 0 AND state IN ('accepted', 'trained')
ORDER BY ticket, sample"""


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
        server=ServerProfile(
            step_s, sequence_s, 0.0, 0.0, request_s, slots_of(config), bytes_per_s=1e12, swap_s=pause_s
        ),
        lengths=GroupLengths(lengths[lengths.mean(1).argsort()].ravel().tolist(), lengths.shape[1], seed),
        prompt=round(mean["prompt"]),
        train_s=0.0,
        train_token_s=mean["train"] / mean["tokens_per_s"] * num_ranks_of(config),
        publish_s=max(0.0, mean["weights"] * mean["step_s"] - pause_s),
        reward_s=reward_s,
        weight_bytes=1.0,
    )


def _samples(run: RunFolder, config: GRPOConfig, step_s: Any) -> tuple[Any, Any, float]:
    """Return of each sample its tokens, these times the sequences that ran beside it, the requests that its server took
    meanwhile, and its interruptions; the seconds since it got a slot; and the mean seconds of rewards.

    The ledger has durations, not times: an episode began when the version was published that it counts from, or, above
    the concurrency, when the first one that ran had ended.
    """
    with open_for_reading(run.ledger) as database, reading(run.ledger):
        rows = database.execute(_SAMPLES).fetchall()
    size, slots = config.gconfig.n_samples, slots_of(config)
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
        found = least_squares(counts, seconds, 1 / np.sqrt(np.maximum(expected, 1e-3)))
        expected = counts @ found
    return cast("list[float]", found.tolist())


def least_squares(counts: Any, seconds: Any, weights: Any = 1.0) -> Any:
    """Return the seconds of one of each count, `[K]` for counts `[N, K]`, that fit best and are not negative."""
    kept = np.arange(counts.shape[1])
    weights = np.broadcast_to(weights, len(seconds))
    while (best := np.linalg.lstsq(counts[:, kept] * weights[:, None], seconds * weights)[0]).min() < 0:
        kept = np.delete(kept, best.argmin())
    return np.bincount(kept, best, counts.shape[1])
