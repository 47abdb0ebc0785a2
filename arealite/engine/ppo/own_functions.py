"""Checks of the return values of a user's loss and advantage functions.

Without them a mean, or a column `[N, 1]`, would be broadcast over tokens and train a different objective.
"""

# N packed tokens, S completions of all ranks

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict

from arealite.algorithms.objectives import TokenLosses

_TAKEN = {"loss", "entropy", "ref_kl", "teacher_kl", "mismatch_kl", "ratio_max", "rollout_importance_weight"}
_TAKEN |= {"rollout_importance_weight_max", "rollout_importance_dropped_ratio"}
"""Names of the actor's own statistics."""
_NO_MEAN = "Leave out means and sums: the actor averages, as actor.aggregation says."


def checked_loss_fn(loss_fn: Callable[[torch.Tensor, Any], Any]) -> Callable[[torch.Tensor, Any], TokenLosses]:
    """Wrap a user's loss function with checks of its return value.

    Masked tokens of its inputs are 0: a NaN would survive a product with 0.
    """

    def checked(logprobs: torch.Tensor, batch: TensorDict) -> TokenLosses:
        mask_N = batch["loss_mask"]
        floats = {key: torch.where(mask_N, values, 0.0) for key, values in batch.items() if values.is_floating_point()}
        returned = loss_fn(torch.where(mask_N, logprobs, 0.0), batch.copy().update(floats))
        return _checked_losses(returned, logprobs, mask_N)

    return checked


def _checked_losses(returned: Any, logprobs: torch.Tensor, loss_mask: torch.Tensor) -> TokenLosses:
    """Return the token losses `[N]`, and statistics without gradient."""
    is_pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
    if not is_pair:
        raise ValueError(
            f"loss_fn must return (token losses, statistics): got {_described(returned)}. End it with `return losses, "
            "{}`, or with statistics in the dict."
        )
    losses_N, statistics = returned
    _require_shape("loss_fn must return one loss per token", losses_N, logprobs, _NO_MEAN)
    if torch.is_grad_enabled() and not losses_N.requires_grad:
        raise ValueError(
            "loss_fn must return losses that depend on logprobs: got a tensor without gradient. Compute them from "
            "logprobs, not from logprobs.detach()."
        )
    wrong_N = loss_mask & ~losses_N.detach().isfinite()
    if wrong_N.any() and logprobs.detach()[loss_mask].isfinite().all():
        raise ValueError(
            f"loss_fn must return finite losses of trained tokens: got {losses_N[wrong_N][0].item()}. Clamp log ratios "
            "to +-20 before exp, and divide by nothing that can be 0."
        )
    for name, values in statistics.items():
        if name in _TAKEN:
            raise ValueError(
                f"a statistic of loss_fn must have a name of its own: got {name!r}, a metric of the actor. Rename it."
            )
        _require_shape(f"statistic {name!r} of loss_fn must have one value per token", values, logprobs, _NO_MEAN)
    return losses_N, {name: values.detach() for name, values in statistics.items()}


def checked_advantages(returned: Any, rewards: torch.Tensor) -> torch.Tensor:
    """Return the detached advantages `[S]` of a user's `advantage_fn`, of the dtype of `rewards [S]`."""
    _require_shape(
        "advantage_fn must return one advantage per completion", returned, rewards, "All tokens of one share it."
    )
    advantages_S = returned.detach().to(rewards)
    if not (is_finite_S := advantages_S.isfinite()).all():
        raise ValueError(
            f"advantage_fn must return finite advantages: got {advantages_S[~is_finite_S][0].item()}. Divide by "
            "nothing that can be 0, such as the deviation of a group of equal rewards."
        )
    return advantages_S


def _require_shape(rule: str, value: Any, like: torch.Tensor, advice: str) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != like.shape or value.is_complex():
        raise ValueError(f"{rule}, a real tensor of shape {list(like.shape)}: got {_described(value)}. {advice}")


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
