"""Where metrics go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from arealite.api.config.types import ConfigBase, Folder, Name, PositiveInt

LOGGER_MODES = {
    "wandb": ("disabled", "online", "offline", "shared"),
    "swanlab": ("disabled", "local", "cloud", "offline"),
    "trackio": ("disabled", "online"),
}
"""Values of `mode` of each service."""


@dataclass
class TensorBoardConfig(ConfigBase):
    """TensorBoard."""

    path: str | None = None
    """Folder of the event files; None is off."""


@dataclass
class StatsLoggerConfig(ConfigBase):
    """Where metrics go besides `metrics.jsonl`."""

    experiment_name: Name = ""
    """Filled in from the top level."""
    trial_name: Name = ""
    """Filled in from the top level."""
    fileroot: Folder = ""
    """Filled in from `cluster.fileroot`."""
    line_freq_steps: PositiveInt = 1
    """Steps per line on the console, for very short steps; `metrics.jsonl` has every step."""
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    """TensorBoard."""
    wandb: dict[str, Any] = field(default_factory=lambda: {"mode": "disabled"})
    """Weights & Biases, passed to `wandb.init` unless mode is disabled; the run's names and config are filled in."""
    swanlab: dict[str, Any] = field(default_factory=lambda: {"mode": "disabled"})
    """SwanLab, passed to `swanlab.init` likewise."""
    trackio: dict[str, Any] = field(default_factory=lambda: {"mode": "disabled"})
    """Trackio, passed to `trackio.init` likewise; mode is disabled or online."""
