"""Configs and metrics of a run's steps. A resumed run drops the records of repeated steps."""

from pathlib import Path

from arealite.api.run_folder import RunFolder, numbered
from arealite.utils.files import keep_rows, reading, write_atomically


def config_of_step(run: RunFolder, step: int) -> Path:
    """Return the config file of a step: `config.yaml`, or the file of an earlier process.

    `config_until_<S>.yaml` is the config of the steps before S, if the run resumed at S with another config.
    """
    earlier = numbered(run.path, "config_until_", ".yaml")
    return next((path for end, path in earlier.items() if end > step), run.config)


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
