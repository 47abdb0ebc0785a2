import os
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
        began = time.monotonic()
        with (
            pytest.raises(TimeoutError, match=rf"run must belong to one run at a time: got process {holder.pid},"),
            file_lock(path, timeout_s=0.2),
        ):
            pass
        assert 0.2 <= time.monotonic() - began < 60
        holder.send_signal(signal.SIGKILL)
        with file_lock(path, timeout_s=5):
            assert path.read_text() == f"{os.getpid()}\n"
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_it_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with file_lock(tmp_path / ".lock", timeout_s=0):
            pass
