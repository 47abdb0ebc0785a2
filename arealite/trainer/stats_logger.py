"""Metrics of the run: collected on every rank, written by rank 0 as a line and a row of `metrics.jsonl` per step.

Row N has the metrics of the update from version N to N + 1, trained on `rollouts/step_<N>`; `eval/version` is the
version of an evaluation. A number that is not finite is stored as null.
"""

import atexit
import importlib
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from arealite.api import collapse
from arealite.api.cli_args import BaseExperimentConfig, StatsLoggerConfig, masked, to_yaml
from arealite.api.errors import ConfigError
from arealite.api.io_struct import FinetuneSpec
from arealite.api.run_folder import RunFolder, numbered
from arealite.api.run_metrics import OTHER_REWARDS, has_other_rewards, named, summarize
from arealite.trainer.checkpoint import config_of_step
from arealite.trainer.step_line import StepLine, bounds
from arealite.utils import heartbeat, trace
from arealite.utils.distributed import global_rank
from arealite.utils.files import keep_rows, read_jsonl, reading, rows_of, write_atomically, writing
from arealite.utils.secret import environment_without_secret
from arealite.utils.stats import Reduction, StatsTracker
from arealite.utils.stop import RunStopped

logger = logging.getLogger("arealite.stats")

_WHOLE_LINE = 1000  # characters
_REPORT_TIMEOUT_S = 600.0
_SILENT_S = 30.0  # a step prints a line after this time, regardless of `line_freq_steps`


class StatsLogger:
    """Collects and writes the metrics of a loop: `timer`, `add`, `commit` once per step, `close`. Collective."""

    def __init__(
        self,
        config: StatsLoggerConfig,
        ft_spec: FinetuneSpec,
        *,
        experiment: BaseExperimentConfig | None = None,
        start_step: int = 0,
    ) -> None:
        """The `experiment` config is stored with the run. Metrics of steps from `start_step` on are removed."""
        self._tracker = StatsTracker()
        self._evaluated_version: float | None = None
        self._writer = _Writer(config, ft_spec, experiment, start_step) if global_rank() == 0 else None

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Measure a phase of the loop as `time/<name>_s` and report it as the current phase."""
        heartbeat.tick()
        with self._tracker.timer(name):
            yield
        heartbeat.tick()

    def add(self, metrics: Mapping[str, float] | None, *, reduce: Reduction | None = None) -> None:
        """Add metrics of this step: maxima, minima or means by their keys; None adds nothing."""
        if metrics is None:
            return
        version = metrics.get("eval/version")
        if version is not None and self._evaluated_version is not None:
            raise ValueError(
                f"a step must hold one evaluation: got versions {self._evaluated_version:g} and {version:g}. "
                "Evaluate at the top of the loop, or call commit in between."
            )
        self._evaluated_version = self._evaluated_version if version is None else version
        self._tracker.add(metrics, reduce=reduce)

    def commit(self, step: int) -> dict[str, float]:
        """End step `step`: reduce over ranks, write, and return the row, equal on all ranks (collective)."""
        if self._writer is not None and self._writer.has_other_rewards:
            self._tracker.add({OTHER_REWARDS: 1.0})
        metrics = named(self._tracker.collect(step))
        self._evaluated_version = None
        if "perf/processed_tokens" in metrics and metrics["time/step_s"] > 0:
            metrics["perf/tokens_per_s"] = metrics["perf/processed_tokens"] / metrics["time/step_s"]
        metrics |= bounds(metrics)
        if self._writer is not None:
            self._writer.write(step, metrics)
        return metrics

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Write `summary.json` (key numbers of the run, plus `summary`) and `report.html`, and close all outputs."""
        if self._writer is not None:
            print(f"done: {self._writer.close({'is_finished': True} | dict(summary or {}))}", flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Write summary and report of a run that was stopped before `close`."""
        if self._writer is not None and isinstance(error, RunStopped):
            self._writer.close({"is_finished": False})


class _Writer:
    """The outputs of rank 0."""

    def __init__(
        self, config: StatsLoggerConfig, ft_spec: FinetuneSpec, experiment: BaseExperimentConfig | None, start_step: int
    ) -> None:
        self._run = run = RunFolder(config)
        run.path.mkdir(parents=True, exist_ok=True)
        undo_from(run, start_step)
        self.has_other_rewards = any(map(has_other_rewards, rows_of(run.metrics)))
        resolved: dict[str, Any] = {}
        self._bound: int | None = None
        if experiment is not None:
            resolved = masked(text := to_yaml(experiment))
            write_config(run, text, start_step=start_step)
            self._bound = experiment.rollout.max_head_offpolicyness if experiment.rollout else None
        self._sinks = open_sinks(config, folder=run.path, resolved=resolved, start_step=start_step)
        self._rows = run.metrics.open("a", encoding="utf-8")
        self._null_keys: set[str] = set()
        self._first: list[dict[str, float]] = []  # steps since the start of this process
        self._last: deque[dict[str, float]] = deque(maxlen=collapse.NUM_STEPS)
        self._has_warned = False
        self._traced_until: int | None = None
        if experiment is not None and experiment.num_traced_steps:
            self._traced_until = start_step + experiment.num_traced_steps
            atexit.register(trace.join, run.trace)  # however the run ends
            if trace.FOLDER_VARIABLE not in os.environ:
                logger.warning("perf_trace has no effect: only launchers that start the processes trace them")
        self._line_freq_steps, self._silent_s = config.line_freq_steps, 0.0
        # A launcher sets COLUMNS if its output is a terminal; a file or pipe gets whole lines.
        width = shutil.get_terminal_size((_WHOLE_LINE, 0)).columns
        self._line = StepLine(total_steps=ft_spec.total_train_steps, staleness_bound=self._bound, width=width)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.has_other_rewards |= has_other_rewards(metrics)
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        new_nulls = metrics.keys() - finite.keys() - self._null_keys
        if new_nulls:  # once per metric: a diverged run must not flood its log
            logger.warning("step %d: %s not finite: stored as null", step, ", ".join(sorted(new_nulls)))
            self._null_keys |= new_nulls
        row = {"step": step} | dict.fromkeys(metrics) | finite
        with writing(self._rows.name):
            self._rows.write(json.dumps(row, allow_nan=False) + "\n")
            self._rows.flush()
        self._silent_s += metrics["time/step_s"]
        is_due = step % self._line_freq_steps == 0 or self._silent_s >= _SILENT_S
        warning = self._warning(metrics)
        if is_due or warning or "eval/version" in metrics or "eval/loss" in metrics:
            print(self._line.render(step, metrics), flush=True)
            self._silent_s = 0.0
        if warning:
            print(f"step {step} WARNING: {warning}", flush=True)
        if step == self._traced_until:  # every rank has written the previous step
            trace.join(self._run.trace)
            atexit.unregister(trace.join)
        for sink in self._sinks:
            sink.write(step, finite)

    def _warning(self, metrics: dict[str, float]) -> str | None:
        """Return a warning if the run goes wrong, once."""
        if self._has_warned or "reward/mean" not in metrics:
            return None
        self._last.append(metrics)
        if len(self._first) < collapse.NUM_STEPS:
            self._first.append(metrics)
        warning = collapse.warning_of(self._first, list(self._last))
        self._has_warned = warning is not None
        return warning

    def close(self, summary: Mapping[str, Any]) -> Path:
        self._rows.close()
        for sink in self._sinks:
            sink.close()
        whole = summarize(read_jsonl(self._run.metrics), max_head_offpolicyness=self._bound) | dict(summary)
        write_atomically(self._run.summary, json.dumps(whole, indent=2) + "\n")
        return _write_report(self._run)


def _write_report(run: RunFolder) -> Path:
    """Write `report.html` in a subprocess and return its path, or the run folder after a failure.

    No rank loads the viewer, and a finished run does not fail because of its report.
    """
    command, env = [sys.executable, "-m", "arealite.cli.main", "report", str(run.path)], environment_without_secret()
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_REPORT_TIMEOUT_S, env=env)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        logger.error("report.html was not written: %s. Write it by: arealite report %s", error, run.path)
        return run.path
    return run.report


SERVICES = ("wandb", "swanlab", "trackio")  # packages with `init` (gets the config block), `log` and `finish`


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


def write_config(run: RunFolder, text: str, *, start_step: int) -> None:
    """Write the config of the steps from `start_step` on, and keep a different config of earlier steps."""
    earlier = config_of_step(run, start_step - 1)
    with reading(earlier):
        before = earlier.read_text(encoding="utf-8") if start_step > 0 and earlier.exists() else text
    for end, path in numbered(run.path, "config_until_", ".yaml").items():
        if end >= start_step:
            path.unlink()
    if before != text:
        write_atomically(run.path / f"config_until_{start_step}.yaml", before, mode=0o600)
    write_atomically(run.config, text, mode=0o600)


def undo_from(run: RunFolder, step: int) -> None:
    """Drop metrics and summaries from step `step` on, because these steps are repeated.

    The rollout engine drops rollouts, `recover` checkpoints.
    """
    keep_rows(run.metrics, "step", before=step)
    for path in (run.summary, run.report):
        path.unlink(missing_ok=True)
