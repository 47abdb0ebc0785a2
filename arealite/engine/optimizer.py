"""AdamW and its learning-rate schedule, a pure function of the number of steps taken."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from arealite.api.cli_args import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(torch.optim.AdamW):
    """AdamW on this rank's parts of parameters, which may be split over different meshes; torch's refuses a mixture.

    With bfloat16 moments a step computes in float32, one parameter after the other.
    """

    def __init__(self, groups: list[dict[str, Any]], moments: torch.dtype | None, **options: Any) -> None:
        super().__init__(groups, **options)
        self.moments = moments  # None is the dtype of the parameter

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            names, (beta1, beta2) = ("lr", "weight_decay", "eps", "maximize"), group["betas"]
            options: Any = {name: group[name] for name in names} | {"beta1": beta1, "beta2": beta2}
            every = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameters in [every] if self.moments is None else [[one] for one in every]:
                states = [_started(self, one) for one in parameters]
                kept = [[local_part(state[name]) for state in states] for name in MOMENTS]
                moments = [[one.float() for one in of_kind] for of_kind in kept] if self.moments else kept
                options |= {"state_steps": [state["step"] for state in states], "max_exp_avg_sqs": []}
                own, gradients = [local_part(one) for one in parameters], [local_part(one.grad) for one in parameters]
                adamw(own, gradients, moments[0], moments[1], fused=True, amsgrad=False, **options)
                for stored, computed in zip(kept, moments) if self.moments else ():
                    stored[0].copy_(computed[0])


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_adamw(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig) -> AdamW:
    """Build AdamW over all trainable parameters; norms and biases (vectors) have no weight decay."""
    every = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in every if parameter.ndim > 1]},
        {"params": [parameter for parameter in every if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    moments = torch.bfloat16 if config.type == "adam_bf16" else None
    return AdamW([group for group in groups if group["params"]], moments, fused=True, **options)


def _started(optimizer: AdamW, parameter: torch.nn.Parameter) -> dict[str, Any]:
    """Return the state of a parameter, initialised with 0 before the first step."""
    if parameter not in optimizer.state:
        moments = {name: torch.zeros_like(parameter, dtype=optimizer.moments) for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
    state: dict[str, Any] = optimizer.state[parameter]
    return state


def optimizer_state(model: torch.nn.Module, optimizer: AdamW) -> dict[str, dict[str, torch.Tensor]]:
    """Return the state of AdamW by name of the parameter, 0 before the first step; reading into it restores it."""
    return {name: _started(optimizer, one) for name, one in model.named_parameters() if one.requires_grad}


def lr_factor(step: int, *, shape: str, total_steps: int, warmup_steps: int, min_ratio: float) -> float:
    """Return the fraction of the peak learning rate after `step` steps.

    Warmup rises linearly from above 0; `linear` and `cosine` then decay to `min_ratio` at `total_steps`.
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
