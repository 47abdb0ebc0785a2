"""One rank of the trainer under torchrun: gives it an output of its own and reports how it ended.

torchrun lets all ranks share its output and waits up to half a minute for the other ranks before it tells of a failed
one. So torchrun starts this program, which opens the stream of its rank by path, runs the entry script on it, and
writes `<rank> <exit status>` to the report pipe at once. Both paths come from `job_run`.

    python -m arealite.launcher.place.rank ENTRY ARGUMENTS...
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from arealite.utils.environment import RANK_REPORT_VARIABLE, RANK_STREAMS_VARIABLE
from arealite.utils.processes import die_with_parent, exit_status


def main(command: list[str]) -> int:
    """Run the entry script and return its exit status."""
    die_with_parent(os.getppid())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun signals the whole group; the script's end is ours
    streams = os.environ.pop(RANK_STREAMS_VARIABLE).split(",")
    report = os.open(os.environ.pop(RANK_REPORT_VARIABLE), os.O_WRONLY)
    output = os.open(streams[int(os.environ["LOCAL_RANK"])], os.O_WRONLY | os.O_NOCTTY)
    this_process = os.getpid()
    script = subprocess.Popen(
        [sys.executable, *command],
        stdout=output,
        stderr=output,
        preexec_fn=lambda: _become_script(this_process),
    )
    status = exit_status(script.wait())
    os.write(report, f"{os.environ['RANK']} {status}\n".encode())
    return status


def _become_script(parent: int) -> None:
    """End with the parent, and take SIGTERM again (an ignored signal stays ignored across exec)."""
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
