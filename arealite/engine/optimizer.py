"""AdamW and its learning-rate schedule, a pure function of the number of steps taken."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from arealite.api.cli_args import OptimizerConfig


def make_adamw(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Build AdamW over all parameters that are not frozen; norms and biases (vectors) do not decay."""
    every = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in every if parameter.ndim > 1]},
        {"params": [parameter for parameter in every if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of AdamW by name; before the first step it is 0, where torch would take a step to make one."""
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        if parameter not in optimizer.state:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
    return get_optimizer_state_dict(model, optimizer)


def lr_factor(step: int, *, shape: str, total_steps: int, warmup_steps: int, min_ratio: float) -> float:
    """Return the fraction of the peak learning rate after `step` steps.

    Warmup rises linearly from above 0; `linear` and `cosine` then fall to `min_ratio` at `total_steps` and stay there.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    remaining = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}[shape]
    return min_ratio + (1.0 - min_ratio) * remaining


class LRSchedule:
    """Sets the learning rate of an optimizer by the number of steps taken."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_steps: int | None) -> None:
        if total_steps is None and config.lr_scheduler_type != "constant":
            raise ValueError(
                f"a {config.lr_scheduler_type} schedule must know how long training is: got ft_spec=None. "
                "Pass a FinetuneSpec to initialize or set lr_scheduler_type: constant."
            )
        self._optimizer = optimizer
        self._config = config
        self._total_steps = total_steps or 0
        self.set_step(0)

    def set_step(self, num_steps: int) -> None:
        """Set the learning rate after `num_steps` steps."""
        self.num_steps = num_steps
        factor = lr_factor(
            num_steps,
            shape=self._config.lr_scheduler_type,
            total_steps=self._total_steps,
            warmup_steps=int(self._config.warmup_steps_proportion * self._total_steps),
            min_ratio=self._config.min_lr_ratio,
        )
        self.lr = self._config.lr * factor
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr
