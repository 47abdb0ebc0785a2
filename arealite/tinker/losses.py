"""Losses of the Tinker API. Each is a sum over the target tokens of all data, with no mean.

`r` is the ratio of the current policy to the one that sampled a token, `exp(logprob - logprobs)`.
"""

from collections.abc import Callable, Mapping

import torch

Columns = Mapping[str, torch.Tensor]
Config = Mapping[str, float]


def _cross_entropy(logprobs_N: torch.Tensor, columns: Columns, config: Config) -> torch.Tensor:
    return -logprobs_N * columns["weights"]


def _importance_sampling(logprobs_N: torch.Tensor, columns: Columns, config: Config) -> torch.Tensor:
    return -(logprobs_N - columns["logprobs"]).exp() * columns["advantages"]


def _ppo(logprobs_N: torch.Tensor, columns: Columns, config: Config) -> torch.Tensor:
    ratios_N, advantages_N = (logprobs_N - columns["logprobs"]).exp(), columns["advantages"]
    clipped_N = ratios_N.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N)


def _cispo(logprobs_N: torch.Tensor, columns: Columns, config: Config) -> torch.Tensor:
    ratios_N = (logprobs_N.detach() - columns["logprobs"]).exp()
    clipped_N = ratios_N.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -clipped_N * logprobs_N * columns["advantages"]


def _dro(logprobs_N: torch.Tensor, columns: Columns, config: Config) -> torch.Tensor:
    drift_N = logprobs_N - columns["logprobs"]
    return -(logprobs_N * columns["advantages"] - 0.5 * config["beta"] * drift_N.square())


_RATIO = ("logprobs", "advantages")
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_LOSSES: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...], Config]] = {
    "cross_entropy": (_cross_entropy, ("weights",), {}),
    "importance_sampling": (_importance_sampling, _RATIO, {}),  # r A, whose gradient is that of REINFORCE
    "ppo": (_ppo, _RATIO, _CLIPS),  # min(r A, clip(r) A), arXiv:1707.06347
    "cispo": (_cispo, _RATIO, _CLIPS),  # clip(r) without gradient, times logprob times A, arXiv:2506.13585
    "dro": (_dro, _RATIO, {"beta": 0.05}),  # logprob A - beta / 2 log(r)^2, arXiv:2405.19107
}
"""Function, names of its inputs beside `target_tokens`, and defaults of its config."""


def inputs_of(loss: str, config: Config) -> tuple[str, ...]:
    """Return the names of a loss's inputs; ValueError for a loss, or a key of its config, that we do not have."""
    if loss not in _LOSSES:
        raise ValueError(
            f"loss_fn must be {', '.join(_LOSSES)}: got {loss}. Use one of them, or forward_backward_custom, whose "
            "loss the client computes."
        )
    if unknown := config.keys() - _LOSSES[loss][2].keys():
        known = ", ".join(_LOSSES[loss][2]) or "nothing"
        raise ValueError(f"loss_fn_config of {loss} must have {known}: got {', '.join(sorted(unknown))}. Remove it.")
    return _LOSSES[loss][1]


def token_losses(loss: str, logprobs_N: torch.Tensor, columns: Columns, config: Config) -> torch.Tensor:
    """Return the loss of each token, `[N]`; logprobs have a gradient, other inputs are float32."""
    function, _, defaults = _LOSSES[loss]
    return function(logprobs_N, columns, {**defaults, **config})
