"""Mistakes that the config alone shows, in process; `make test-mistakes` makes the others. Golden text: `mistakes/`."""

from __future__ import annotations

from pathlib import Path

import pytest
from mistakes.judge import golden, judge, normalised
from mistakes.table import OF_CONFIG, OF_DATA_AND_MODEL, OF_RUNS, Mistake, prepare

from arealite.launcher import local

ALL = [*OF_CONFIG, *OF_DATA_AND_MODEL, *OF_RUNS]


@pytest.mark.parametrize("mistake", OF_CONFIG, ids=lambda one: one.name)
def test_a_mistake_in_the_config_is_one_sentence_before_anything_starts(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    prepare(mistake, tmp_path, tmp_path / "empty")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("sys.argv", ["local.py"])
    try:
        status = local.main([*mistake.command[2:], *mistake.arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    shown = capfd.readouterr()
    text = normalised(shown.out + shown.err, tmp_path)
    assert judge(mistake, status, text) == []
    assert text == golden()[mistake.name], "make test-mistakes ARGS=--write keeps the new text, if it is better"


def test_every_mistake_has_a_kept_text() -> None:
    assert [one.name for one in ALL] == list(golden())


@pytest.mark.parametrize(
    "status, text, wrong",
    [
        (0, "ConfigError: seed must be 1", "exit status 0, not 2"),
        (2, "\n".join(["a line"] * 13), "13 lines"),
        (2, "Traceback (most recent call last):", "a traceback"),
        (2, '  File "REPOSITORY/arealite/api/errors.py:N", in f', "a frame of ours"),
        (2, "launcher | server-0 is ready at 127.0.0.1:PORT", "a server was started"),
        (2, "ConfigError: somewhere", "the user's line is missing"),
    ],
)
def test_what_is_wrong_with_an_output_is_seen(status: int, text: str, wrong: str) -> None:
    assert any(one.startswith(wrong) for one in judge(Mistake("planted", has_place=True), status, text))
