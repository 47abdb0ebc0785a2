"""By which status a process ends with an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from arealite.api.errors import (
    PEER_LOST,
    REFUSED,
    CheckpointError,
    ConfigError,
    LedgerError,
    UnreachableError,
    exit_status_of,
)

RESET = "[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"


def caused_by(cause: Exception) -> Exception:
    error = ValueError("outer")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("seed must be 1: got 2"), REFUSED),
        (CheckpointError("incomplete"), REFUSED),
        (LedgerError("locked"), REFUSED),
        (ExceptionGroup("several", [ConfigError("first"), ValueError("second")]), REFUSED),
        (caused_by(ConfigError("inner")), REFUSED),
        (RuntimeError(RESET), PEER_LOST),
        (caused_by(RuntimeError("NCCL communicator was aborted on rank 1")), PEER_LOST),
        (RuntimeError("CUDA error"), None),
        (UnreachableError("server-0: Connection reset by peer"), None),
        (ConnectionResetError("Connection reset by peer"), None),
    ],
)
def test_statuses(error: Exception, status: int | None) -> None:
    assert exit_status_of(error) == status


@pytest.mark.parametrize("shown", ["", "1", "log"])
@pytest.mark.parametrize(
    ("error", "status"), [("ConfigError('a')", REFUSED), (f"RuntimeError({RESET!r})", PEER_LOST), ("KeyError(1)", 1)]
)
def test_a_script_ends_by_the_status_of_its_error(tmp_path: Path, error: str, status: int, shown: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from arealite.api.errors import ConfigError\nfrom arealite.api.script import show_errors_briefly\n"
        f"show_errors_briefly()\nraise {error}\n"
    )
    root = Path(__file__).parents[2]
    env = {"PYTHONPATH": str(root), "AREALITE_TRACEBACK": shown, "PATH": ""}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == status and error.partition("(")[0] in done.stderr
