import errno
import fcntl
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arealite.utils.files import file_lock

HOLD = """
import sys, time
from pathlib import Path
from arealite.utils.files import file_lock
with file_lock(Path(sys.argv[1]), timeout_s=0):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_holder_is_named_and_its_death_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "run" / ".lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        began, name = time.monotonic(), f"{holder.pid} on {platform.node()}"
        with (
            pytest.raises(TimeoutError, match=f"run must belong to one run at a time: got process {name}, which"),
            file_lock(path, timeout_s=0.2),
        ):
            pass
        assert 0.2 <= time.monotonic() - began < 60
        holder.send_signal(signal.SIGKILL)
        with file_lock(path, timeout_s=120):
            assert path.read_text() == f"{os.getpid()} on {platform.node()}\n"
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Lustre refuses them so unless it is mounted with `flock`."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(OSError, match=rf"{tmp_path} must be on a file system with locks: got \[Errno {number}\].*flock"),
        file_lock(tmp_path / ".lock", timeout_s=0),
    ):
        pass
