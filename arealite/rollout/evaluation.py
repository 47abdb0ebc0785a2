"""Metrics of an evaluation: means over prompts with 95 % intervals, counting prompts without a result."""

# B rows, R runs of a workflow, each one sample, P prompts

import math
import re
from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict

from arealite.api.workflow_api import own_metrics, runs_of

_Z = 1.96  # of a 95 % interval
_OURS = re.compile(r"(reward|accuracy|pass@\d+)(_low|_high)?|num_samples|num_failed")


def evaluation_metrics(batch: TensorDict, num_prompts: int) -> dict[str, float]:
    """Summarize trajectories `[B, T]` of those of `num_prompts` prompts that have a result by `sample_metrics`."""
    runs = runs_of(batch, batch["group_index"])
    columns = {name: runs.mean(values) for name, values in own_metrics(batch).items()}
    columns["completion_tokens"] = runs.sum(batch["loss_mask"].bool().sum(1))
    if "no_eos" in set(batch.keys()):
        columns["truncated_ratio"] = runs.max(batch["no_eos"].byte())
    rewards_R, group_index_R = batch["rewards"][runs.first_rows], batch["group_index"][runs.first_rows]
    return sample_metrics(rewards_R, group_index_R, columns, num_prompts)


def sample_metrics(
    rewards_R: torch.Tensor, group_index_R: torch.Tensor, columns: Mapping[str, torch.Tensor], num_prompts: int
) -> dict[str, float]:
    """Summarize the samples of those of `num_prompts` prompts that have a result, and further columns `[R]` by name.

    Samples of a prompt are averaged first. `reward` leaves out prompts without a result: what none is worth compared to
    a bad one, only the user can say. If every reward is 0 or 1 and no weighted sum of `rewards/<name>`, `accuracy`
    counts them as wrong. `<name>_low` and `<name>_high` are a 95 % interval. A column named like one of these is
    `workflow/<name>`.
    """
    samples_P = group_index_R.bincount()

    def per_prompt(values_R: torch.Tensor) -> torch.Tensor:
        sums_P = torch.zeros(len(samples_P), dtype=torch.float64)
        return sums_P.index_add(0, group_index_R, values_R.double()) / samples_P

    rewards_P = per_prompt(rewards_R)
    num_failed = num_prompts - len(samples_P)
    metrics = {"reward": (value := rewards_P.mean().item())}
    if len(rewards_P) > 1:
        half = _Z * rewards_P.std().item() / math.sqrt(len(rewards_P))
        metrics |= {"reward_low": value - half, "reward_high": value + half}
    if is_binary(rewards_R.tolist()) and not any(name.startswith("rewards/") for name in columns):
        solved_P = [*rewards_P.tolist(), *[0.0] * num_failed]
        metrics |= share_with_interval("accuracy", solved_P, max_information=int(samples_P.max()))
    for name, values_R in columns.items():
        metrics[f"workflow/{name}" if _OURS.fullmatch(name) else name] = per_prompt(values_R).mean().item()
    return metrics | {"num_samples": float(len(rewards_R)), "num_failed": float(num_failed)}


def pass_metrics(num_right_P: Sequence[int], num_samples: int, pass_at_k: Sequence[int]) -> dict[str, float]:
    """Return pass@k and its 95 % interval over prompts for each k; `num_right_P` of a prompt's samples are right."""
    metrics: dict[str, float] = {}
    for k in pass_at_k:
        values_P = [pass_at(k, num_right, num_samples) for num_right in num_right_P]
        metrics |= share_with_interval(f"pass@{k}", values_P, max_information=num_samples / k)
    return metrics


def pass_at(k: int, num_right: int, num_samples: int) -> float:
    """Estimate without bias the probability that at least one of `k` samples is right: 1 - C(n - c, k) / C(n, k) for c
    right ones of n, as a product (arXiv:2107.03374)."""
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_right + 1, num_samples + 1))


def is_binary(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are 0 or 1."""
    return set(rewards) <= {0, 1}


def share_with_interval(name: str, values_P: Sequence[float], *, max_information: float) -> dict[str, float]:
    """Return the mean of values in [0, 1] of independent prompts and its 95 % interval, `<name>_low` and `<name>_high`.

    The interval is Wilson's (doi 10.1080/01621459.1927.10502953) at the effective number of prompts: as many as would,
    being right or wrong, have a mean of the same variance. For values of 0 and 1 these are the prompts themselves, and
    at most `max_information` for each prompt.
    """
    num_prompts, share = len(values_P), sum(values_P) / len(values_P)
    variance = sum((value - share) ** 2 for value in values_P) / num_prompts
    of_one = share * (1 - share)
    gain = min(max_information, of_one / max(variance, 1e-12)) if of_one > 0 else 1.0
    n = num_prompts * max(1.0, gain)
    centre, scale = share + _Z**2 / (2 * n), 1 + _Z**2 / n
    half = _Z * math.sqrt(of_one / n + (_Z / (2 * n)) ** 2)
    return {
        name: share,
        f"{name}_low": max(0.0, centre - half) / scale,
        f"{name}_high": min(scale, centre + half) / scale,
    }
