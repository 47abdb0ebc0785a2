"""Where metrics go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from arealite.api.config.types import ConfigBase, Folder, Name, PositiveInt


@dataclass
class WandBConfig(ConfigBase):
    """Weights & Biases; fields go to `wandb.init`."""

    mode: Literal["disabled", "online", "offline"] = "disabled"
    """`disabled` is off."""
    entity: str | None = None
    """User or team."""
    project: str | None = None
    """None is the experiment's name."""
    name: str | None = None
    """None is the trial's name."""
    job_type: str | None = None
    """Kind of run."""
    group: str | None = None
    """Group of runs."""
    notes: str | None = None
    """Free text."""
    tags: list[str] | None = None
    """Labels."""
    config: dict[str, Any] | None = None
    """Extra values stored with the run."""


@dataclass
class SwanlabConfig(ConfigBase):
    """SwanLab; fields go to `swanlab.init`."""

    mode: Literal["disabled", "local", "cloud", "offline"] = "disabled"
    """`disabled` is off."""
    project: str | None = None
    """None is the experiment's name."""
    name: str | None = None
    """None is the trial's name."""
    config: dict[str, Any] | None = None
    """Extra values stored with the run."""
    logdir: str | None = None
    """None is SwanLab's default."""


@dataclass
class TensorBoardConfig(ConfigBase):
    """TensorBoard."""

    path: str | None = None
    """Folder of the event files; None is off."""


@dataclass
class TrackioConfig(ConfigBase):
    """Trackio; fields go to `trackio.init`."""

    mode: Literal["disabled", "online"] = "disabled"
    """`disabled` is off."""
    project: str | None = None
    """None is the experiment's name."""
    name: str | None = None
    """None is the trial's name."""
    space_id: str | None = None
    """Hugging Face space to show the run in; None is local."""


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
    wandb: WandBConfig = field(default_factory=WandBConfig)
    """Weights & Biases."""
    swanlab: SwanlabConfig = field(default_factory=SwanlabConfig)
    """SwanLab."""
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    """TensorBoard."""
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    """Trackio."""
