"""Saves the model at intervals as a Hugging Face folder, `<run>/checkpoints/step_<N>`, which appears whole."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from arealite.api.cli_args import SaverConfig
from arealite.api.engine_api import TrainEngine
from arealite.api.errors import CheckpointError
from arealite.api.io_struct import FinetuneSpec, SaveLoadMeta
from arealite.api.run_folder import RunFolder
from arealite.utils.distributed import agreed
from arealite.utils.files import publish_folder
from arealite.utils.frequency import Frequency


class Saver:
    """Decides when to save, and saves. Every rank calls it once per step."""

    def __init__(self, config: SaverConfig, ft_spec: FinetuneSpec) -> None:
        self._folder = RunFolder(config).checkpoints
        self._frequency = Frequency(config, ft_spec.steps_per_epoch)
        self._last: Path | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return when it last saved."""
        return self._frequency.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._frequency.load_state_dict(state)

    def save(self, engine: TrainEngine, step: int, *, tokenizer: Any = None, force: bool = False) -> Path | None:
        """Save after step `step` if due or forced, but no step twice; return the folder (collective)."""
        if not self._frequency.check(force=force):
            return None
        path = self._folder / f"step_{step}"
        if path == self._last:
            return path
        unfinished = path.with_name(f".{path.name}.unfinished")
        is_first = dist.get_rank() == 0
        agreed(lambda: _prepare(unfinished) if is_first else None)
        engine.save(SaveLoadMeta(path=str(unfinished), tokenizer=tokenizer))
        dist.barrier()
        agreed(lambda: _publish(unfinished, path) if is_first else None)
        self._last = path
        return path


def _prepare(unfinished: Path) -> None:
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def _publish(unfinished: Path, path: Path) -> None:
    try:
        publish_folder(unfinished, path)
    except OSError as error:
        raise CheckpointError(
            f"{path} must be free for the finished {unfinished}: got {error}. Move what lies there."
        ) from error
