"""Finding processes and ending them with all their descendants. Linux only.

A process is *gone* when it has ended, even if nobody has reaped it yet: a zombie holds no memory, port or device.
Everything goes by recorded process ids; nothing is ever searched by name.
"""

import contextlib
import ctypes
import functools
import os
import resource
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_libc = ctypes.CDLL(None, use_errno=True)


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; zombies do not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in _GONE
    return False


def identity(pid: int) -> str | None:
    """Name a living process so that no later one of the same pid is taken for it: `<pid>-<start in clock ticks>`."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # psutil knows the start only by the wall clock, which may be set while we run.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return f"{pid}-{fields[19]}"
    return None


@functools.cache
def machine() -> str:
    """Name this node so that processes of the same pid elsewhere are not taken for ours; a container is another."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{boot}-{os.readlink('/proc/self/ns/pid').strip('pid:[]')}"


def catches(pid: int, number: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        return bool(int(status.partition("\nSigCgt:")[2].split()[0], 16) >> (number - 1) & 1)
    return False


def descendants(pid: int) -> list[int]:
    """Return the living children of a process, their children and so on, parents first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True) if is_alive(child.pid)]
    return []


def wait_gone(pids: Iterable[int], timeout_s: float) -> set[int]:
    """Wait until all processes are gone and return those that are not after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as files:
        poll, waiting = select.poll(), {}
        for pid in set(pids):
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                files.callback(os.close, pidfd)
                poll.register(pidfd, select.POLLIN)
                waiting[pidfd] = pid
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for pidfd, _ in poll.poll(left_s * 1000):
                poll.unregister(pidfd)
                del waiting[pidfd]
        return {pid for pid in waiting.values() if is_alive(pid)}


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants, and wait until they are gone (10 s at most)."""
    for _ in range(10):  # a process may have forked between the look and the kill
        tree = [process for process in [pid, *descendants(pid)] if is_alive(process)]
        if not tree:
            return
        for process in tree:
            send_signal(process, signal.SIGKILL)
        wait_gone(tree, timeout_s=1)


def kill_group(leader: int, is_alive: bool) -> None:
    """SIGKILL the leader of a process group with its descendants, and processes that it has left in its group."""
    if is_alive:
        kill_tree(leader)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Return the files of shared memory that processes have mapped, semaphores included."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8") as maps:  # it may be gone
            inodes |= {int(line.split()[4]) for line in maps if " /dev/shm/" in line}
    # A semaphore was mapped under another name than it has, so names don't tell.
    return {entry.path for entry in os.scandir("/dev/shm") if entry.inode() in inodes} if inodes else set()


def sockets(pids: Iterable[int]) -> set[str]:
    """Return the files of the Unix sockets that processes have bound."""
    paths = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):  # it may be gone
            paths |= {str(one.laddr) for one in psutil.Process(pid).net_connections("unix")}
    return {path for path in paths if path.startswith("/")}


def send_signal(pid: int, number: int) -> None:
    """Signal a process that may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def die_with_parent(parent: int) -> None:
    """Make the kernel SIGKILL this process when the thread that started it ends; `parent` is who did."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans(adopt: bool = True) -> bool:
    """Become the new parent of descendants whose parent ends (a child subreaper), and tell whether we were before."""
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))
    return bool(before.value)


def raise_file_limit() -> None:
    """Let this process, and those it starts, have as many open files as they may: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def exit_status(returncode: int) -> int:
    """Return the exit status a shell reports: 128 + n for a process that signal n ended."""
    return returncode if returncode >= 0 else 128 - returncode


def num_oom_kills() -> int:
    """Return how many processes the kernel of this node has ended because memory ran out, since it booted."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as counters:
        return sum(int(line.split()[1]) for line in counters if line.startswith("oom_kill "))
    return 0


def describe_exit(status: int) -> str:
    """Say how a process ended, e.g. `exit status 1` or `exit status 137 (SIGKILL)`."""
    with contextlib.suppress(ValueError):
        return f"exit status {status} ({signal.Signals(status - 128).name})"
    return f"exit status {status}"


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
