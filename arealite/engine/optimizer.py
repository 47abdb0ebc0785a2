"""AdamW and its learning-rate schedule, a pure function of the number of steps taken."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.adamw import adamw

from arealite.api.cli_args import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamWBF16(torch.optim.AdamW):
    """AdamW with moments stored in bfloat16; a step computes in float32, one parameter after the other."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            names, (beta1, beta2) = ("lr", "weight_decay", "eps", "maximize"), group["betas"]
            options: Any = {name: group[name] for name in names} | {"beta1": beta1, "beta2": beta2}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = _started(self, parameter)
                first, second = (state[name].float() for name in MOMENTS)
                options |= {"state_steps": [state["step"]], "max_exp_avg_sqs": []}
                adamw([parameter], [parameter.grad], [first], [second], fused=True, amsgrad=False, **options)
                for name, moment in zip(MOMENTS, (first, second)):
                    state[name].copy_(moment)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments as bfloat16; torch casts them to the dtype of their parameter."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: state[name].bfloat16() for name in MOMENTS if name in state})


def make_adamw(parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
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
    cls = AdamWBF16 if config.type == "adam_bf16" else torch.optim.AdamW
    return cls([group for group in groups if group["params"]], fused=True, **options)


def _started(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, Any]:
    """Return the state of a parameter, initialised with 0 before the first step."""
    if parameter not in optimizer.state:
        dtype = torch.bfloat16 if isinstance(optimizer, AdamWBF16) else parameter.dtype
        moments = {name: torch.zeros_like(parameter, dtype=dtype) for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
    state: dict[str, Any] = optimizer.state[parameter]
    return state


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of AdamW by name, 0 before the first step (torch would take a step to initialise it)."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        _started(optimizer, parameter)
    return get_optimizer_state_dict(model, optimizer)


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
