import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from arealite.api.cli_args import SaverConfig
from arealite.api.io_struct import FinetuneSpec, SaveLoadMeta
from arealite.trainer.saver import Saver
from arealite.utils.distributed import join_default_group, leave_default_group

FT_SPEC = FinetuneSpec(total_train_epochs=2, dataset_size=12, train_batch_size=4)


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    join_default_group(60.0)
    yield
    leave_default_group()


class FileEngine:
    """Saves its one number, and can fail half way."""

    def __init__(self) -> None:
        self.weight = 0
        self.fails = False

    def save(self, meta: SaveLoadMeta) -> None:
        Path(meta.path).mkdir(exist_ok=True)
        (Path(meta.path) / "model").write_text(f"{self.weight} {meta.tokenizer}")
        if self.fails:
            raise RuntimeError("disk full")


def saver_of(folder: Path, **triggers: float) -> Saver:
    return Saver(SaverConfig(experiment_name="exp", trial_name="t0", fileroot=str(folder), **triggers), FT_SPEC)


def test_saves_when_due(tmp_path: Path) -> None:
    saver, engine = saver_of(tmp_path, freq_epochs=1), FileEngine()
    paths = []
    for step in range(7):
        engine.weight = step
        paths.append(saver.save(engine, step, tokenizer="tok"))
    folder = tmp_path / "exp/t0/checkpoints"
    assert paths == [None, None, folder / "step_2", None, None, folder / "step_5", None]
    assert sorted(os.listdir(folder)) == ["step_2", "step_5"]
    assert (folder / "step_5/model").read_text() == "5 tok"


def test_other_engines_have_folders_of_their_names(tmp_path: Path) -> None:
    path = saver_of(tmp_path).save(FileEngine(), 0, force=True, critic=None, judge=FileEngine(), teacher=FileEngine())
    assert path is not None and sorted(os.listdir(path)) == ["judge", "model", "teacher"]


def test_no_step_is_saved_twice(tmp_path: Path) -> None:
    saver, engine = saver_of(tmp_path, freq_steps=2), FileEngine()
    for engine.weight in range(2):
        path = saver.save(engine, engine.weight)
    engine.fails = True
    assert saver.save(engine, 1, force=True) == path


def test_a_folder_of_that_name_is_complete(tmp_path: Path) -> None:
    saver, engine = saver_of(tmp_path, freq_steps=1), FileEngine()
    engine.fails = True
    with pytest.raises(RuntimeError, match="disk full"):
        saver.save(engine, 0)
    folder = tmp_path / "exp/t0/checkpoints"
    assert os.listdir(folder) == [".step_0.unfinished"]
    (folder / ".step_0.unfinished/leftover").touch()
    engine.fails = False
    assert os.listdir(saver.save(engine, 0)) == ["model"]
    assert os.listdir(folder) == ["step_0"]
