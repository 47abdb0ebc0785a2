"""Records of a run's steps: their configs and metrics. A run that resumes drops those of steps it redoes."""

from pathlib import Path

from arealite.api.run_folder import RunFolder, numbered
from arealite.utils.files import keep_rows, reading, write_atomically


def config_of_step(run: RunFolder, step: int) -> Path:
    """Return the file with the config under which a step was trained: `config.yaml`, or that of an earlier process.

    `config_until_<S>.yaml` holds that of the steps before S, when a run resumed from a checkpoint with another one.
    """
    earlier = numbered(run.path, "config_until_", ".yaml")
    return next((path for end, path in earlier.items() if end > step), run.config)


def write_config(run: RunFolder, text: str, *, start_step: int) -> None:
    """Write the config of the steps from `start_step` on, and keep a different one of the steps before."""
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
    """Drop metrics and summaries from step `step` on; those steps will be redone.

    Rollouts belong to the rollout engine, checkpoints to `recover`.
    """
    keep_rows(run.metrics, "step", before=step)
    for path in (run.summary, run.report):
        path.unlink(missing_ok=True)
