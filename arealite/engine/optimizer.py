"""AdamW and its learning-rate schedule, a pure function of the number of steps taken."""

import math
from collections.abc import Iterable

import torch

from arealite.api.cli_args import OptimizerConfig


def make_adamw(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Build AdamW over all parameters."""
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


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
