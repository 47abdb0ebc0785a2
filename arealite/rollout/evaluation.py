"""What an evaluation has measured: means over prompts, each with its interval; a prompt without a result counts too."""

import math

import torch
from tensordict import TensorDict

from arealite.api.workflow_api import own_metrics

_Z = 1.96  # of a 95 % interval


def evaluation_metrics(batch: TensorDict, num_prompts: int) -> dict[str, float]:
    """Summarize the trajectories `[B, T]` of those of `num_prompts` prompts that have a result.

    Samples of a prompt are averaged first. If every reward is 0 or 1, the mean is called `accuracy` and counts prompts
    without a result as wrong. Otherwise it is called `reward` and leaves them out: what no result is worth compared to
    a bad one, only the user can say. `<name>_low` and `<name>_high` are a 95 % interval.
    """
    rewards_B, group_index_B = batch["rewards"].double(), batch["group_index"]
    samples_P = group_index_B.bincount()

    def per_prompt(values_B: torch.Tensor) -> torch.Tensor:
        sums_P = torch.zeros(len(samples_P), dtype=torch.float64)
        return sums_P.index_add(0, group_index_B, values_B.double()) / samples_P

    rewards_P = per_prompt(rewards_B)
    if bool(((rewards_B == 0) | (rewards_B == 1)).all()):
        value = rewards_P.sum().item() / num_prompts
        low, high = _wilson(value, num_prompts)
        metrics = {"accuracy": value, "accuracy_low": low, "accuracy_high": high}
    else:
        metrics = {"reward": (value := rewards_P.mean().item())}
        if len(rewards_P) > 1:
            half = _Z * rewards_P.std().item() / math.sqrt(len(rewards_P))
            metrics |= {"reward_low": value - half, "reward_high": value + half}
    metrics |= {name: per_prompt(values_B).mean().item() for name, values_B in own_metrics(batch).items()}
    metrics["completion_tokens"] = per_prompt(batch["loss_mask"].bool().sum(1)).mean().item()
    if "no_eos" in set(batch.keys()):
        metrics["truncated_ratio"] = per_prompt(batch["no_eos"]).mean().item()
    return metrics | {"num_samples": float(len(batch)), "num_failed": float(num_prompts - len(samples_P))}


def _wilson(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's interval of a share of `n` independent prompts (doi 10.1080/01621459.1927.10502953).

    It is too wide where a prompt has several samples, of which nobody knows how much they depend on each other.
    """
    centre, scale = share + _Z**2 / (2 * n), 1 + _Z**2 / n
    half = _Z * math.sqrt(share * (1 - share) / n + (_Z / (2 * n)) ** 2)
    return max(0.0, centre - half) / scale, min(scale, centre + half) / scale
