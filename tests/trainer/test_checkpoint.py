"""The files of checkpoints, apart from what they mean."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arealite.trainer.checkpoint import checkpoints, find_damage, prune, publish, remove
from arealite.utils.files import file_entries


def publish_step(folder: Path, step: int, **files: bytes) -> Path:
    unfinished = folder / f".step_{step}.unfinished"
    unfinished.mkdir(parents=True)
    for name, content in (files or {"a": b"x" * step}).items():
        (unfinished / name).write_bytes(content)
    publish(unfinished, folder / f"step_{step}", file_entries(unfinished, os.listdir(unfinished)))
    return folder / f"step_{step}"


def test_published_whole_in_place_of_one_of_that_name(tmp_path: Path) -> None:
    publish_step(tmp_path, 3, a=b"old", b=b"old")
    path = publish_step(tmp_path, 3, a=b"new")
    assert os.listdir(tmp_path) == ["step_3"] and sorted(os.listdir(path)) == ["a", "manifest.json"]
    assert find_damage(path) is None


def test_a_manifest_cut_at_any_byte_or_with_any_bit_flipped_is_found(tmp_path: Path) -> None:
    path = publish_step(tmp_path, 1, a=b"", b=b"xyz") / "manifest.json"
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        assert find_damage(path.parent) == "manifest.json is cut off or was changed"
        path.write_bytes(whole[:end] + bytes([whole[end] ^ 1 << end % 8]) + whole[end + 1 :])
        assert find_damage(path.parent) == "manifest.json is cut off or was changed"
    path.unlink()
    assert find_damage(path.parent) == "manifest.json is missing"


@settings(max_examples=settings.default.max_examples // 5)
@given(data=st.binary(min_size=1, max_size=2000), at=st.integers(min_value=0), bit=st.integers(0, 7))
def test_any_damage_to_a_file_is_told(tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int, bit: int) -> None:
    path = publish_step(tmp_path_factory.mktemp("run"), 1, data=data) / "data"
    at %= len(data)
    path.write_bytes(data[:at])
    assert find_damage(path.parent) == f"data has {at} bytes instead of {len(data)}"
    path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
    assert find_damage(path.parent) == "data was changed"
    path.unlink()
    assert find_damage(path.parent) == "data is missing"


def test_checkpoints_are_published_folders_newest_first(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "nothing") == []
    for step in (2, 10, 9):
        publish_step(tmp_path, step)
    for name in (".step_11.unfinished", "step_x", "other"):
        (tmp_path / name).mkdir()
    assert [step for step, _ in checkpoints(tmp_path)] == [10, 9, 2]


@pytest.mark.parametrize(
    ("scores", "kept"),
    [({}, [4, 5]), ({1: 0.2, 2: 0.5, 3: 0.5, 4: 0.1}, [2, 4, 5]), ({5: 1.0, 1: 0.2}, [4, 5]), ({9: 1.0}, [4, 5])],
)
def test_the_newest_and_the_best_are_kept(tmp_path: Path, scores: dict[int, float], kept: list[int]) -> None:
    for step in range(1, 6):
        publish_step(tmp_path, step)
    prune(tmp_path, keep_last=2, scores=scores)
    assert sorted(os.listdir(tmp_path)) == [f"step_{step}" for step in kept]


def test_what_was_half_removed_does_not_come_back(tmp_path: Path) -> None:
    path = publish_step(tmp_path, 1)
    (tmp_path / ".step_1.removed").mkdir()
    remove(path)
    assert os.listdir(tmp_path) == []
    (tmp_path / ".step_1.removed").mkdir()
    remove(path)
    assert os.listdir(tmp_path) == [], "a removal that was cut off is finished"
