"""Saves the model at intervals as a Hugging Face folder, `<run>/checkpoints/step_<N>`, which appears whole."""

from pathlib import Path
from typing import Any

from arealite.api.cli_args import SaverConfig
from arealite.api.engine_api import TrainEngine
from arealite.api.io_struct import FinetuneSpec, SaveLoadMeta
from arealite.api.run_folder import RunFolder
from arealite.utils.distributed import on_rank_0
from arealite.utils.files import fresh_folder, publish_folder
from arealite.utils.frequency import Frequency


class Saver(Frequency):
    """Saves at intervals. Every rank calls it once per step."""

    def __init__(self, config: SaverConfig, ft_spec: FinetuneSpec) -> None:
        super().__init__(config, ft_spec.steps_per_epoch)
        self._folder = RunFolder(config).checkpoints
        self._last: Path | None = None

    def save(
        self,
        engine: TrainEngine,
        step: int,
        *,
        tokenizer: Any = None,
        processor: Any = None,
        force: bool = False,
        **engines: TrainEngine | None,
    ) -> Path | None:
        """Save after step `step` if due or forced, at most once per step; return the folder (collective).

        `processor` is the image processor of a vision model. Other engines are saved in subfolders of their names: the
        folder of `critic=` can be the `critic.path` of another run.
        """
        if not self.check(force=force):
            return None
        path = self._folder / f"step_{step}"
        if path == self._last:
            return path
        unfinished = path.with_name(f".{path.name}.unfinished")
        on_rank_0(lambda: fresh_folder(unfinished))
        engine.save(SaveLoadMeta(path=str(unfinished), tokenizer=tokenizer, processor=processor))
        for name, extra in engines.items():
            if extra is not None:
                extra.save(SaveLoadMeta(path=str(unfinished / name), tokenizer=tokenizer))
        on_rank_0(lambda: publish_folder(unfinished, path))
        self._last = path
        return path
