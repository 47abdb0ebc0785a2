"""Reports are written in this process, which has imported what they need."""

import contextlib
import io
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from arealite.cli.main import main
from arealite.trainer import stats_logger


def run_here(command: list[str], **_: Any) -> None:
    assert command[1:4] == ["-m", "arealite.cli.main", "report"]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            status = main(command[3:])
    except OSError:
        status = 1
    if status != 0:
        raise subprocess.CalledProcessError(status, command)


@pytest.fixture(autouse=True)
def _report_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_logger, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": run_here}))
