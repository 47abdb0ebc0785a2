"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from arealite.api.config.types import ConfigBase, Fraction, HalfOpenFraction, NonNegative, Positive


@dataclass
class OptimizerConfig(ConfigBase):
    """AdamW and its learning-rate schedule."""

    type: Literal["adam"] = "adam"
    """`adam` is AdamW."""
    lr: NonNegative = 2e-5
    """Peak learning rate."""
    weight_decay: NonNegative = 0.05
    """Decoupled weight decay."""
    beta1: HalfOpenFraction = 0.9
    """Decay of the mean of gradients."""
    beta2: HalfOpenFraction = 0.95
    """Decay of the mean of squared gradients."""
    eps: Positive = 1e-5
    """Added to the denominator."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate of the linear and cosine schedules, as a share of `lr`."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after warmup."""
    warmup_steps_proportion: Fraction = 0.001
    """Share of the training steps in which the learning rate rises from 0."""
    gradient_clipping: Positive = 1.0
    """Largest norm of the gradient."""
