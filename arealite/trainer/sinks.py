"""Where the row of a step goes besides `metrics.jsonl` and the console: TensorBoard, W&B, SwanLab, Trackio.

A sink exists only if the config asks for it, and every key of its block that is set reaches the service.
"""

from __future__ import annotations

import dataclasses
import importlib
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from arealite.api.cli_args import StatsLoggerConfig, SwanlabConfig, TensorBoardConfig, TrackioConfig, WandBConfig
from arealite.api.errors import ConfigError


class Sink(Protocol):
    """Takes the finite numbers of every step."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Take one step."""

    def close(self) -> None:
        """Flush."""


def open_sinks(config: StatsLoggerConfig, *, folder: Path, resolved: dict[str, Any], start_step: int = 0) -> list[Sink]:
    """Start the services that the config asks for; `resolved` is the run's config, stored with the run.

    A run that goes on from `start_step` goes on there too, except at SwanLab, which gets a second run of that name.
    """
    names = {"project": config.experiment_name, "name": config.trial_name}
    sinks: list[Sink] = []
    if config.tensorboard.path is not None:
        sinks.append(TensorBoardSink(config.tensorboard, start_step=start_step))
    if config.wandb.mode != "disabled":
        sinks.append(WandBSink(config.wandb, names=names, folder=folder, resolved=resolved, start_step=start_step))
    if config.swanlab.mode != "disabled":
        sinks.append(SwanlabSink(config.swanlab, names=names, resolved=resolved))
    if config.trackio.mode != "disabled":
        sinks.append(TrackioSink(config.trackio, names=names, resolved=resolved, start_step=start_step))
    return sinks


class TensorBoardSink:
    """Event files."""

    def __init__(self, config: TensorBoardConfig, *, start_step: int) -> None:
        _import("tensorboard", key="stats_logger.tensorboard.path")
        summary_writer = _import("torch.utils.tensorboard", key="stats_logger.tensorboard.path").SummaryWriter
        self._writer = summary_writer(config.path, purge_step=start_step or None)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandBSink:
    """Weights & Biases; offline runs lie in the run folder."""

    def __init__(
        self,
        config: WandBConfig,
        *,
        names: dict[str, str],
        folder: Path,
        resolved: dict[str, Any],
        start_step: int,
    ) -> None:
        wandb = _import("wandb", key="stats_logger.wandb.mode")
        id_path = folder / ".wandb_id"
        if start_step == 0 or not id_path.exists():
            id_path.write_text(uuid.uuid4().hex[:16], encoding="utf-8")
        options = names | _given(config) | {"id": id_path.read_text(encoding="utf-8")}
        if start_step > 0:
            options["resume"] = "allow"
        options["config"] = resolved | (config.config or {})
        self._run = wandb.init(dir=str(folder), **options)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class SwanlabSink:
    """SwanLab."""

    def __init__(self, config: SwanlabConfig, *, names: dict[str, str], resolved: dict[str, Any]) -> None:
        self._swanlab = _import("swanlab", key="stats_logger.swanlab.mode")
        options = names | _given(config)
        options["config"] = resolved | (config.config or {})
        options["experiment_name"] = options.pop("name")
        self._swanlab.init(**options)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._swanlab.log(metrics, step=step)

    def close(self) -> None:
        self._swanlab.finish()


class TrackioSink:
    """Trackio."""

    def __init__(
        self, config: TrackioConfig, *, names: dict[str, str], resolved: dict[str, Any], start_step: int
    ) -> None:
        trackio = _import("trackio", key="stats_logger.trackio.mode")
        options = names | _given(config)
        del options["mode"]
        if start_step > 0:
            options["resume"] = "allow"
        self._run = trackio.init(config=resolved, **options)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


def _given(config: Any) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(config).items() if value is not None}


def _import(module: str, *, key: str) -> ModuleType:
    package = key.split(".")[1]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key} must name a service whose package is installed: importing {module} failed ({error}). "
            f"Run `pip install 'arealite[{package}]'` or remove the key."
        ) from error
