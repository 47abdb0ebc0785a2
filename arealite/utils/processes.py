"""Processes of this node: their environment, limits and garbage, and ending them with all descendants. Linux only.

A process is *gone* when it has ended, even before it is reaped: a zombie holds no memory, port or device. Processes
are identified by recorded ids, never searched by name.
"""

import contextlib
import ctypes
import functools
import gc
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
_YOUNG = 2_000  # allocations between two collections of young objects, which take a millisecond each
_COLLECT_S = 60.0
_libc = ctypes.CDLL(None, use_errno=True)

# Environment variables that a launcher sets for the processes of a run.
SERVER_ADDRS_VARIABLE = "AREAL_LLM_SERVER_ADDRS"  # of the inference servers: host:port, separated by commas
RESTART_VARIABLE = "AREAL_RECOVER_RUN"  # `1` if the run is restarted after a failure
REGISTRY_VARIABLE = "AREALITE_REGISTRY"  # the registry of the run: host:port, or the path of its registry.json


class QuietCollector:
    """Replaces automatic collections of old objects: with 4,096 episodes in flight they took most of the time."""

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()  # modules live as long as the process
        gc.set_threshold(_YOUNG, 10**6, 10**6)  # what 20 collections had left took half a second at 4,096 episodes
        self._collected_at = time.monotonic()

    def collect(self) -> None:
        """Collect everything, at most once a minute; call it at quiet moments."""
        if time.monotonic() - self._collected_at > _COLLECT_S:
            gc.collect()
            self._collected_at = time.monotonic()


def is_alive(pid: int) -> bool:
    """Return True if a process runs; zombies do not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in _GONE
    return False


def identity(pid: int) -> str | None:
    """Return `<pid>-<start in clock ticks>`, which no later process of the same pid has; None without a process."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # psutil knows the start only by the wall clock, which may be set while we run.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return f"{pid}-{fields[19]}"
    return None


@functools.cache
def machine() -> str:
    """Return a name of this node (or container) that tells equal pids of several nodes apart."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{boot}-{os.readlink('/proc/self/ns/pid').strip('pid:[]')}"


def descendants(pid: int) -> list[int]:
    """Return the living descendants of a process, parents first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True) if is_alive(child.pid)]
    return []


def wait_gone(pids: Iterable[int], timeout_s: float) -> set[int]:
    """Wait until all processes are gone; return those that are not after `timeout_s`."""
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
    """SIGKILL the leader of a process group with its descendants, then the rest of the group."""
    if is_alive:
        kill_tree(leader)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Return the files in /dev/shm that processes have mapped, semaphores included."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8") as maps:  # it may be gone
            inodes |= {int(line.split()[4]) for line in maps if " /dev/shm/" in line}
    # By inode, because a semaphore is mapped under a temporary name.
    return {entry.path for entry in os.scandir("/dev/shm") if entry.inode() in inodes} if inodes else set()


def send_signal(pid: int, number: int) -> None:
    """Signal a process that may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def die_with_parent(parent: int) -> None:
    """Make the kernel SIGKILL this process when the thread of `parent` that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans(adopt: bool = True) -> bool:
    """Become the parent of orphaned descendants (a child subreaper); return whether this process was one before."""
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))
    return bool(before.value)


def raise_file_limit() -> None:
    """Raise the limit of open files, which include connections, to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def exit_status(returncode: int) -> int:
    """Return the exit status as a shell reports it: 128 + n for signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def num_oom_kills() -> int:
    """Return the number of processes that the kernel has killed for lack of memory since boot."""
    with contextlib.suppress(OSError), open("/proc/vmstat") as counters:
        return sum(int(line.split()[1]) for line in counters if line.startswith("oom_kill "))
    return 0


def describe_exit(status: int) -> str:
    """Describe how a process ended: `exit status 1`, `exit status 137 (SIGKILL)`."""
    with contextlib.suppress(ValueError):
        return f"exit status {status} ({signal.Signals(status - 128).name})"
    return f"exit status {status}"


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
