"""`python -m arealite.launcher.place.guard COMMAND...`: nothing outlives the command or the guard's owner.

The owner holds the other end of the guard's stdin and never writes to it. When that end or the command ends, all
descendants get SIGKILL, daemons included, and the shared memory that they had made is removed. SIGTERM goes to the
command alone. The exit status is the command's, 128 + n if signal n ended it. If the guard itself is killed, the kernel
kills the command.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from arealite.utils import processes


def main(command: list[str]) -> int:
    """Run the command to its end or to the owner's."""
    processes.adopt_orphans()
    processes.raise_file_limit()
    guard = os.getpid()
    of_others = {str(path) for path in Path("/dev/shm").glob("*")}  # the command may map data that was there
    try:
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=lambda: processes.die_with_parent(guard))
    except OSError as error:
        print(f"can't start {command[0]}: {error}", file=sys.stderr)
        return 127
    left: set[str] = set()

    def look() -> None:
        left.update(processes.shared_memory(processes.descendants(guard)))

    def terminate(number: int, frame: object) -> None:
        look()
        processes.send_signal(job.pid, number)

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    poll = select.poll()
    poll.register(os.pidfd_open(job.pid), select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN)
    poll.poll()
    returncode = 0
    with contextlib.suppress(ChildProcessError):  # as every orphan becomes our child, nothing is left without a child
        while True:
            look()
            for pid in processes.descendants(guard):
                processes.send_signal(pid, signal.SIGKILL)
            pid, status = os.wait()
            if pid == job.pid:
                returncode = os.waitstatus_to_exitcode(status)
    for path in left - of_others:
        Path(path).unlink(missing_ok=True)
    return processes.exit_status(returncode)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
