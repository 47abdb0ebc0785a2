"""One rank of the trainer under torchrun: gives it an output of its own and reports how it ended.

torchrun lets all ranks share its output and waits up to half a minute for the other ranks before it tells of a failed
one. So torchrun starts this program, which opens the launcher's stream for its rank by path, runs the entry script on
it, and writes `<rank> <exit status>` to the launcher's report pipe at once.

    python -m arealite.launcher.rank --streams PATH,PATH,... --report PATH ENTRY ARGUMENTS...
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

from arealite.utils.processes import die_with_parent, exit_status


def main(argv: list[str]) -> int:
    """Run the entry script and return its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", required=True, help="output of each rank")
    parser.add_argument("--report", required=True, help="pipe that learns how ranks end")
    parser.add_argument("entry", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    rank = int(os.environ["RANK"])

    die_with_parent(os.getppid())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun signals the whole group; the script's end is ours
    report = os.open(args.report, os.O_WRONLY)
    output = os.open(args.streams.split(",")[rank], os.O_WRONLY | os.O_NOCTTY)
    this_process = os.getpid()
    script = subprocess.Popen(
        [sys.executable, *args.entry],
        stdout=output,
        stderr=output,
        preexec_fn=lambda: _become_script(this_process),
    )
    status = exit_status(script.wait())
    os.write(report, f"{rank} {status}\n".encode())
    return status


def _become_script(parent: int) -> None:
    """End with the parent, and take SIGTERM again (an ignored signal stays ignored across exec)."""
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
