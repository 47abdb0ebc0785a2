"""What a guard leaves of a command that can't clean up itself: nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HOLDER = """
import multiprocessing, os, time
from multiprocessing import resource_tracker, shared_memory

def hold(name, semaphore):
    memory = shared_memory.SharedMemory(name)
    print("held", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    memory = shared_memory.SharedMemory(create=True, size=4096)
    context = multiprocessing.get_context("spawn")
    semaphore = context.Semaphore()
    print(memory.name, "sem." + semaphore._semlock.name.removeprefix("/"), flush=True)
    context.Process(target=hold, args=(memory.name, semaphore)).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("ending", ["terminate", "close", "kill the command"])
def test_shared_memory_goes_with_its_processes(tmp_path: Path, ending: str) -> None:
    (tmp_path / "holder.py").write_text(HOLDER)
    guard = subprocess.Popen(
        [sys.executable, "-m", "arealite.launcher.place.guard", sys.executable, str(tmp_path / "holder.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert guard.stdout is not None and guard.stdin is not None
    left = [Path("/dev/shm") / name for name in guard.stdout.readline().split()]
    assert guard.stdout.readline() == "held\n" and all(path.exists() for path in left)
    if ending == "terminate":
        guard.terminate()
    elif ending == "close":
        guard.stdin.close()
    else:
        command = next(
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if path.read_bytes().split(b"\0")[1:2] == [str(tmp_path / "holder.py").encode()]
        )
        subprocess.run(["kill", f"-{signal.SIGKILL.value}", str(command)], check=True)
    guard.wait(120)
    assert not any(path.exists() for path in left)


def test_a_file_that_was_in_shared_memory_before_stays() -> None:
    """Whoever puts a data set there maps it in every job."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(b"data")
        file.flush()
        script = "import mmap, sys, time; file = open(sys.argv[1], 'r+b'); kept = mmap.mmap(file.fileno(), 0); "
        script += "print('held', flush=True); time.sleep(600)"
        guard = subprocess.Popen(
            [sys.executable, "-m", "arealite.launcher.place.guard", sys.executable, "-c", script, file.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert guard.stdout is not None and guard.stdout.readline() == "held\n"
        guard.communicate(timeout=120)  # closes its stdin
        assert Path(file.name).exists()
