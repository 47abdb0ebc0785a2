"""`arealite replay`: repeat one training step of a run and compare the weights.

The local launcher starts the run's own script, without servers, in a scratch folder, from the newest checkpoint before
the step (or from the initial model); what the run sampled comes from its `rollouts/`.
"""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import FilePath, TypeAdapter

from arealite.api.config.types import Name
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.cli import own_trainer
from arealite.launcher import local
from arealite.rollout.account.rollout_file import batch_files, read_rows
from arealite.trainer.checkpoint import checkpoints, config_of_step, find_damage
from arealite.utils.files import reading, require_object
from arealite.weights.log import read_weights, threads_of

T = TypeVar("T")
_NEVER = 10**9  # steps
_TOKENS = ("loss_mask",)  # the smallest column that rows without tokens lack


@dataclass
class _Command:
    """The part of `run.json` that a replay needs."""

    entry: FilePath
    argv: list[str]
    started_in: Path = Path()  # relative paths of the config count from there


@dataclass
class _Names:
    """The part of `config.yaml` that a replay needs."""

    experiment_name: Name
    trial_name: Name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Repeat a training step, also of an asynchronous run, from the newest checkpoint before it and the stored "
        "rollouts, without servers. On a CPU the weights must be bit-identical."
    )
    parser.epilog = (
        "exit status: 0 the weights are bit-identical, 1 they differ, 2 the folder lacks what a replay needs"
    )
    parser.add_argument("run_folder", help="<fileroot>/<experiment>/<trial>")
    parser.add_argument("--step", type=int, required=True, help="the step, counted from 0")


def run(args: argparse.Namespace) -> int:
    """Replay a step and return the exit status: 0 the weights are bit-identical, 1 they differ, 2 it can't be done."""
    run, step = RunFolder(Path(args.run_folder).resolve()), args.step
    command = _read(run.command, _Command)
    config_path = config_of_step(run, step)
    names = _read(config_path, _Names)
    before = ((taken, path) for taken, path in checkpoints(run.recover) if taken < step and find_damage(path) is None)
    checkpoint = next(before, None)
    _check(run, first=0 if checkpoint is None else checkpoint[0] + 1, last=step)
    with tempfile.TemporaryDirectory(prefix="arealite-replay-") as scratch:
        if checkpoint is not None:
            recover = RunFolder(Path(scratch) / names.experiment_name / names.trial_name).recover
            recover.mkdir(parents=True)
            (recover / checkpoint[1].name).symlink_to(checkpoint[1], target_is_directory=True)
        overrides = [
            *_scratch_only(scratch),
            f"recover.mode={'disabled' if checkpoint is None else 'resume'}",
            f"recover.freq_steps={_NEVER}",
            f"rollout.replay_from={run.path}",
            f"rollout.replay_step={step}",
            "launcher.preflight=false",
            f"launcher.trainer_threads={threads_of(run.path, step + 1)}",
            *(word for word in command.argv if word.startswith(own_trainer.TYPE)),
        ]
        with contextlib.chdir(command.started_in if command.started_in.is_dir() else Path()):
            return local.main([str(command.entry), "--config", str(config_path), *overrides])


def _scratch_only(scratch: str) -> Iterator[str]:
    """Yield the keys that make the script write only into the scratch folder, and as little as possible."""
    yield f"cluster.fileroot={scratch}"
    for block in ("saver", "evaluator", "recover", "stats_logger", "rollout"):
        yield f"{block}.fileroot={scratch}"
    for block in ("saver", "evaluator", "recover"):
        yield from (f"{block}.freq_{unit}=null" for unit in ("epochs", "steps", "secs"))
    yield from (f"stats_logger.{sink}.mode=disabled" for sink in ("wandb", "swanlab", "trackio"))
    yield "stats_logger.tensorboard.path=null"


def _check(run: RunFolder, *, first: int, last: int) -> None:
    """Refuse steps for which the run folder lacks data."""
    if config_of_step(run, first) != config_of_step(run, last):
        raise ConfigError(
            f"step {last} must have a checkpoint of its own configuration to start from: got none since "
            f"{config_of_step(run, first).name}. Choose a later step."
        )
    steps = {n: run.rollouts / f"step_{n}" for n in range(first, last + 1)}
    if missing := [path.name for path in steps.values() if not batch_files(path)]:
        raise ConfigError(
            f"{run.rollouts} must hold steps {first} to {last}: got no {missing[0]}. "
            "Choose a step that the run has trained."
        )
    if partly := [n for n, path in steps.items() if any(row["loss_mask"] is None for row in read_rows(path, _TOKENS))]:
        raise ConfigError(
            f"{run.rollouts} must hold all tokens of steps {first} to {last}: got only some of those of "
            f"{', '.join(map(str, partly[:10]))}. Choose another step, or run with rollout.stored_share=1."
        )
    if last + 1 not in read_weights(run.path):
        raise ConfigError(
            f"{run.weights_log} must hold the fingerprint of version {last + 1}: got none. "
            "Run with rollout.weight_check.fingerprint=true, and choose a step that the run has finished."
        )


def _read(path: Path, form: type[T]) -> T:
    """Read a file of the run folder as a dataclass."""
    if not path.exists():
        raise ConfigError(
            f"a run folder must hold {path.name}: got none in {path.parent}. Name the folder of a run that a launcher "
            "started and whose script gave StatsLogger its config."
        )
    with reading(path, yaml.YAMLError):
        text = path.read_text(encoding="utf-8")
        values = require_object(json.loads(text) if path.suffix == ".json" else yaml.safe_load(text))
        return TypeAdapter(form).validate_python(values)
