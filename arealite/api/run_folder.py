"""Where a run keeps its files: below `<fileroot>/<experiment_name>/<trial_name>/`. Nothing is created here."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from arealite.api.config.types import FolderBlock

if TYPE_CHECKING:
    from arealite.api.config.experiment import BaseExperimentConfig

OF_TRIAL = (".launcher.lock", ".trainer.lock", ".secret", "job.sbatch", "slurm-*.log")
"""What stays in the folder of a run that takes the place of an earlier one: held, known to joiners, or Slurm's."""
OF_LAUNCHER = (*OF_TRIAL, "logs", "run.json", "registry.json", "stall_*.txt")
"""What is not the trainer's."""


def numbered(folder: Path, prefix: str, suffix: str = "") -> dict[int, Path]:
    """Return what is called `<prefix><N><suffix>` in a folder by N, ascending; nothing without a folder."""
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a glob looks twice, and it may go in between
        names = [name for name in os.listdir(folder) if name.startswith(prefix) and name.endswith(suffix)]
    paths = {name.removeprefix(prefix).removesuffix(suffix): folder / name for name in names}
    return {int(number): paths[number] for number in sorted(filter(str.isdecimal, paths), key=int)}


class RunFolder:
    """The paths of a run's files, from an experiment's config, a block that knows its run, or the folder itself."""

    def __init__(self, run: BaseExperimentConfig | FolderBlock | str | os.PathLike[str]) -> None:
        if isinstance(run, (str, os.PathLike)):
            self.path = Path(run)
        else:
            self.path = Path(run.fileroot) / run.experiment_name / run.trial_name
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self.calibration = self.path / "calibration.json"  # of a run that `arealite calibrate` started
        self.calls = self.path / "calls.jsonl"  # of a run with a graph: one line per call
        self.graph = self.path / "graph.html"
        self.trace = self.path / "trace.json.gz"
        self.weights_log = self.path / "weights.jsonl"
        self.ledger = self.path / "ledger.sqlite"
        self.rollouts = self.path / "rollouts"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"  # models that the saver wrote
        self.recover = self.path / "recover"  # checkpoints to resume from
        self.weight_update = self.path / "weight_update"  # model of an update through the disk, while it lasts
        self.command = self.path / "run.json"  # entry script and arguments of the run
        self.secret = self.path / ".secret"
        self.registry = self.path / "registry.json"  # where the registry of the run listens, while the run lasts
        self.launcher_lock = self.path / ".launcher.lock"
        self.trainer_lock = self.path / ".trainer.lock"

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end."""
        summary = json.loads(self.summary.read_bytes()) if self.summary.exists() else {}
        return isinstance(summary, dict) and summary.get("is_finished") is True

    @property
    def has_begun(self) -> bool:
        """Whether a step of the run was done."""
        return self.newest_checkpoint >= 0 or (self.metrics.exists() and self.metrics.stat().st_size > 0)

    @property
    def newest_checkpoint(self) -> int:
        """The step of the newest checkpoint to resume from, whole or not; -1 without one."""
        return max(numbered(self.recover, "step_"), default=-1)
