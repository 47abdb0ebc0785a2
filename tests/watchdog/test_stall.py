"""What the watch says of a stalled run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from arealite.watchdog.stall import StallWatch


async def test_a_command_that_is_no_utf_8_is_among_the_evidence(tmp_path: Path) -> None:
    """As a process of the run may have, which opens a file of such a name."""
    command = [sys.executable, "-c", "print(flush=True); input()", b"caf\xe9"]
    watch = StallWatch(
        timeout_s=0.1,
        setup_timeout_s=0.1,
        logs=tmp_path / "logs",
        servers={},
        expected=[],
        secret=None,
        count_output=lambda: 0,
    )
    (tmp_path / "logs").mkdir()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        lines = await watch.next_stall()
        process.communicate()
    assert lines[-1].startswith(f"    all stacks, waits and queues: {tmp_path}/stall_")
    (told,) = tmp_path.glob("stall_*.txt")
    assert "caf\\udce9" in told.read_text(encoding="utf-8")
