"""Metric services besides `metrics.jsonl` and the console: TensorBoard, W&B, SwanLab, Trackio."""

from __future__ import annotations

import importlib
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

from arealite.api.cli_args import StatsLoggerConfig
from arealite.api.errors import ConfigError

SERVICES = ("wandb", "swanlab", "trackio")  # packages with `init` (gets the config block), `log` and `finish`


def open_sinks(config: StatsLoggerConfig, *, folder: Path, resolved: dict[str, Any], start_step: int = 0) -> list[Sink]:
    """Start the configured services; `resolved` is the run's config, which they store.

    A run that resumes from `start_step` resumes at the services too, except SwanLab, which gets a second run.
    """
    names = {"project": config.experiment_name, "name": config.trial_name}
    sinks: list[Sink] = []
    if config.tensorboard.path is not None:
        sinks.append(TensorBoardSink(config.tensorboard.path, start_step=start_step))
    for service in SERVICES:
        block = {key: value for key, value in getattr(config, service).items() if value is not None}
        if block.get("mode", "disabled") != "disabled":
            options = names | block | {"config": resolved | block.get("config", {})}
            sinks.append(ServiceSink(service, _adapted(service, options, folder=folder, start_step=start_step)))
    return sinks


def check_packages(config: StatsLoggerConfig) -> None:
    """Raise ConfigError if a configured service can't be imported."""
    if config.tensorboard.path is not None:
        _import("tensorboard", key="stats_logger.tensorboard.path")
    for service in SERVICES:
        if getattr(config, service).get("mode", "disabled") != "disabled":
            _import(service, key=f"stats_logger.{service}.mode")


class TensorBoardSink:
    """Writes event files."""

    def __init__(self, path: str, *, start_step: int) -> None:
        _import("tensorboard", key="stats_logger.tensorboard.path")
        summary_writer = _import("torch.utils.tensorboard", key="stats_logger.tensorboard.path").SummaryWriter
        self._writer = summary_writer(path, purge_step=start_step or None)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class ServiceSink:
    """A run at a service whose package has the interface of wandb."""

    def __init__(self, service: str, options: dict[str, Any]) -> None:
        self._service = _import(service, key=f"stats_logger.{service}.mode")
        self._service.init(**options)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._service.log(metrics, step=step)

    def close(self) -> None:
        self._service.finish()


Sink = TensorBoardSink | ServiceSink  # gets the finite numbers of every step


def _adapted(service: str, options: dict[str, Any], *, folder: Path, start_step: int) -> dict[str, Any]:
    """Return the arguments of a service's `init`; the user's options take precedence."""
    if service == "swanlab":
        return {"experiment_name": options.pop("name")} | options
    if service == "trackio":
        del options["mode"]  # trackio.init has none
    else:
        id_file = folder / ".wandb_id"
        if start_step == 0 or not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:16], encoding="utf-8")
        options = {"dir": str(folder), "id": id_file.read_text(encoding="utf-8")} | options
    return ({"resume": "allow"} if start_step > 0 else {}) | options


def _import(module: str, *, key: str) -> ModuleType:
    package = key.split(".")[1]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key} must name a service whose package is installed: importing {module} failed ({error}). "
            f"Run `pip install 'arealite[{package}]'` or remove the key."
        ) from error
