"""What a run folder says of steps that different processes trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.api.run_folder import RunFolder
from arealite.trainer.records import config_of_step, write_config
from arealite.utils.files import FileError


def configs(folder: Path, steps: int) -> str:
    return "".join(config_of_step(RunFolder(folder), step).read_text() for step in range(steps))


def test_every_step_has_the_config_it_was_trained_under(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_config(run, "a", start_step=0)
    write_config(run, "a", start_step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"], "nothing has changed"
    write_config(run, "b", start_step=3)
    assert configs(tmp_path, 6) == "aaabbb"
    write_config(run, "c", start_step=5)
    assert configs(tmp_path, 7) == "aaabbcc"
    write_config(run, "d", start_step=4)
    assert configs(tmp_path, 7) == "aaabddd", "step 4 is done again"
    write_config(run, "d", start_step=2)
    assert configs(tmp_path, 7) == "aaddddd", "the run went back behind the first change"
    write_config(run, "e", start_step=0)
    assert configs(tmp_path, 3) == "eee" and len(list(tmp_path.iterdir())) == 1


def test_a_config_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.config.write_bytes(b"trial_name: caf\xe9\n")
    with pytest.raises(FileError, match=r"config\.yaml must be as its writer left it"):
        write_config(run, "a", start_step=1)
