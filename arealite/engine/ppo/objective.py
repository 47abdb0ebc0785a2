"""The objective of a config, with its settings: one loss per token, which the actor averages."""

# N packed tokens

import functools
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from arealite.algorithms import objectives

TokenLossFn = Callable[[torch.Tensor, TensorDict], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""`(logprobs [N], micro_batch) -> (token losses [N], statistics [N] by name)`; nobody averages."""


def objective_of(choices: Any) -> TokenLossFn:
    """Return the objective of resolved choices; a token with advantage 0 has loss and gradient 0 under each of them."""
    clip = {"eps_clip": choices.eps_clip, "eps_clip_higher": choices.eps_clip_higher}
    level = choices.importance_sampling_level
    made: dict[str, TokenLossFn] = {
        "ppo": functools.partial(objectives.ppo, **clip, c_clip=choices.c_clip, level=level),
        "reinforce": objectives.reinforce,
        "cispo": functools.partial(objectives.cispo, cispo_max=choices.cispo_max),
        "sapo": functools.partial(
            objectives.sapo, tau_positive=choices.sapo_tau_positive, tau_negative=choices.sapo_tau_negative
        ),
        "gmpo": functools.partial(objectives.gmpo, eps_log=choices.gmpo_eps_log),
        "dppo": functools.partial(objectives.dppo, delta=choices.dppo_delta),
    }
    return made[choices.objective]
