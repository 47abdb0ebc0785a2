"""Runs programs that a model wrote: isolated and limited.

A program sees no network, only its own processes, a read-only system, and one writable folder, in memory, that ends
with it. The call ends by the deadline and leaves no process. A failure to isolate a program is an error, never a
result. bubblewrap (Flatpak's) creates the namespaces, the kernel enforces the limits of each process, and a filter
refuses system calls that programs don't need. docs/security.md lists the attacks that were tried, and the limits of
the protection.
"""

import asyncio
import errno
import fcntl
import functools
import logging
import math
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Literal

from arealite.api.errors import ConfigError, EnvError
from arealite.utils import heartbeat
from arealite.utils.background import DaemonThreads
from arealite.utils.processes import exit_status, kill_group, wait_gone

logger = logging.getLogger("arealite.sandbox")

Reason = Literal["time", "cpu", "output"]
Program = str | Sequence[str]
Files = Mapping[str, str | bytes]

_UNCONFINED = 'or write Sandbox(isolation="process"), which limits programs and isolates them from nothing'
_ADVICE = (
    "Install bubblewrap 0.8 or newer, util-linux and libseccomp2, and allow user namespaces: as root, "
    "`sysctl -w kernel.unprivileged_userns_clone=1` (Debian), "
    "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` (Ubuntu), `sysctl -w user.max_user_namespaces=15000` "
    f"(Red Hat); for Docker, `--security-opt seccomp=unconfined --security-opt systempaths=unconfined`; {_UNCONFINED}"
)
_FOLDER = "/sandbox"  # where a program may write; /tmp is the same, unless a Python lies there
_OPEN_FOLDER = "/media"  # where root shows its sandboxes a Python that lies in a folder such as /root
_NOBODY = 65534  # the host's user of a sandbox that root starts: root owns too much of what namespaces share
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_SHARED_MIB = 16  # size of /dev/shm, where semaphores are
_MAX_OPEN = 64  # files per process: each may be a socket, whose buffers are not limited
_COUNTED_PER_NAMESPACE = (5, 14)  # before this kernel the limit on processes counts all of the host's user
_LOOK_S = 0.1  # interval at which time, output and the cancellation of a call are checked
_END_S = 10.0  # deadline for the end of a killed process
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
_DENIED = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp"),  # reach into other processes
    *("keyctl", "add_key", "request_key", "syslog", "bpf", "perf_event_open", "userfaultfd"),  # kernels were broken so
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("mount", "umount2", "pivot_root", "chroot", "setns", "unshare", "open_by_handle_at", "move_mount", "open_tree"),
    "fsopen",
    *("memfd_create", "memfd_secret", "shmget", "msgget"),  # memory that no limit of a process counts
)


@dataclass(frozen=True)
class Limits:
    """The limits of one program."""

    time_s: float = 10.0
    """Seconds by the clock."""
    cpu_s: float = 10.0
    """CPU seconds of each process, rounded up."""
    memory_mib: int = 1024
    """Address space of each process."""
    disk_mib: int = 64
    """The writable folder, which is memory too, and each file."""
    processes: int = 32
    """Processes and threads at once; not limited without isolation, and before Linux 5.14."""
    output_kib: int = 64
    """Limit of stdout and of stderr, each."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            if not 0 < (value := getattr(self, limit.name)) < math.inf:
                raise ConfigError(f"{limit.name} of a sandbox must be positive: got {value}. Use {limit.default}.")


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended, and what it wrote."""

    exit_status: int
    """As a shell reports it: 128 + n if signal n ended it."""
    stdout: str
    stderr: str
    reason: Reason | None
    """The limit for which the program was ended, or its output cut off."""


@dataclass(frozen=True)
class Sandbox:
    """A place for programs, of which at most `max_concurrent` run at once (None: one per CPU of this process).

    `isolation="process"` keeps the limits, but for the number of processes and the size of the folder, and isolates a
    program from nothing.
    """

    limits: Limits = field(default_factory=Limits)
    isolation: Literal["bubblewrap", "process"] = "bubblewrap"
    max_concurrent: int | None = None

    async def run(
        self, program: Program, *, files: Files | None = None, stdin: str | bytes = "", limits: Limits | None = None
    ) -> SandboxResult:
        """Run Python source or a command among `files`, whose names are relative, as soon as a slot is free.

        Raises EnvError if programs can't be isolated, or if the sandbox was killed from outside.
        """
        is_given_up = threading.Event()
        call = functools.partial(self.run_here, files=files, stdin=stdin, limits=limits, is_given_up=is_given_up)
        try:
            return await asyncio.wrap_future(self._slots.submit(call, program))
        finally:
            is_given_up.set()

    def run_here(
        self,
        program: Program,
        *,
        files: Files | None = None,
        stdin: str | bytes = "",
        limits: Limits | None = None,
        is_given_up: threading.Event | None = None,
    ) -> SandboxResult:
        """Run a program in this thread, without waiting for a slot: for rewards, which have processes of their own."""
        files, limits = dict(files or {}), limits or self.limits
        if isinstance(program, str):
            files, program = files | {"main.py": program}, [python(), "main.py"]
        for name in files:
            if PurePosixPath(name).is_absolute() or not name or {"", ".", ".."} & {*name.split("/")}:
                raise ValueError(f"a file of a sandbox must have a relative name: got {name!r}. Write e.g. data/a.txt.")
        confine = _limited if self.isolation == "process" else _isolated
        with ExitStack() as cleanup:
            command = confine(program, files, limits, cleanup)
            return _run(command, stdin, limits, is_given_up or threading.Event(), cleanup)

    async def python_tool(self, code: str) -> str:
        """Run a Python program and return what it prints. Each call begins anew, in an empty folder.

        Args:
            code: The program. It must print what it is to show.
        """
        result = await self.run(code)
        written = result.stdout + result.stderr
        if result.reason is not None:
            return f"{written}\n[ended: too much {result.reason}]"
        return written if result.exit_status == 0 else f"{written}\n[exit status {result.exit_status}]"

    @functools.cached_property
    def _slots(self) -> DaemonThreads:
        return DaemonThreads(self.max_concurrent or len(os.sched_getaffinity(0)), "sandbox")


python_tool = Sandbox(Limits(output_kib=8)).python_tool
"""A tool for agents, with little output, so that it fits a context."""


def python() -> str:
    """Return the Python of this process by a path that exists in a sandbox, with the packages that it has."""
    return os.path.join(os.path.realpath(sys.prefix), "bin", f"python{sys.version_info.major}")


@dataclass(frozen=True)
class _Command:
    words: Sequence[str]
    folder: str
    home: str
    descriptors: Sequence[int] = ()
    status: int | None = None
    """A file where bubblewrap writes how the program ended, if it could be started; None without isolation."""


def _run(
    command: _Command, stdin: str | bytes, limits: Limits, is_given_up: threading.Event, cleanup: ExitStack
) -> SandboxResult:
    """Run a command until it ends or reaches a limit of time or output, and end its remaining processes."""
    cap = limits.output_kib << 10
    files = [_memory_file(stdin), *(os.memfd_create("output", os.MFD_CLOEXEC) for _ in range(2))]
    for file in files:
        cleanup.callback(os.close, file)
    began = time.monotonic()
    process = subprocess.Popen(
        command.words,
        stdin=files[0],
        stdout=files[1],
        stderr=files[2],
        pass_fds=command.descriptors,
        cwd=command.folder,
        env=_ENVIRONMENT | {"HOME": command.home, "TMPDIR": command.home},
        process_group=0,
    )
    reason: Reason | None = None
    try:
        with heartbeat.waiting("a program in a sandbox", on="reward", pid=process.pid):
            while reason is None and not is_given_up.is_set() and wait_gone([process.pid], _LOOK_S):
                reason = "time" if time.monotonic() - began > limits.time_s else _too_long(files[1:], cap)
    finally:
        # bubblewrap takes its namespace along: it ends after all of the program's processes.
        kill_group(process.pid, process.poll() is None)
        process.wait(_END_S)
    stdout, stderr = (os.pread(file, cap, 0).decode(errors="replace") for file in files[1:])
    status = exit_status(process.returncode)
    if reason is None and not is_given_up.is_set():
        if command.status is not None:
            _check_that_it_ran(command.status, process.returncode, stderr)
        reason = "cpu" if status == 128 + signal.SIGXCPU else _too_long(files[1:], cap)
    return SandboxResult(status, stdout, stderr, reason)


def _too_long(outputs: Sequence[int], cap: int) -> Literal["output"] | None:
    return "output" if any(os.fstat(file).st_size > cap for file in outputs) else None


def _check_that_it_ran(status: int, returncode: int, stderr: str) -> None:
    """Raise if bubblewrap failed before it started the program."""
    if b"exit-code" in os.pread(status, 4096, 0):
        return
    if returncode < 0:
        raise EnvError(f"a sandbox must not be killed: got {signal.Signals(-returncode).name}. Free memory.")
    raise EnvError(f"a sandbox must start: got {stderr.strip()[-500:]!r}. {_ADVICE}.")


def _isolated(program: Sequence[str], files: Files, limits: Limits, cleanup: ExitStack) -> _Command:
    """Return a command that runs a program in namespaces of its own, with `files` in its folder."""
    if (bubblewrap := shutil.which("bwrap")) is None:
        raise EnvError(f"bubblewrap must be installed for a sandbox: got no bwrap on the PATH. {_ADVICE}.")
    status = os.memfd_create("status", os.MFD_CLOEXEC)
    descriptors = [status, _memory_file(_syscall_filter()), *map(_memory_file, files.values())]
    for descriptor in descriptors:
        cleanup.callback(os.close, descriptor)
    is_root = os.geteuid() == 0
    prefixes = sorted({os.path.realpath(path) for path in (sys.prefix, sys.base_prefix)})
    pythons = [path for path in prefixes if not f"{path}/".startswith("/usr/")]
    # The system without /etc, /home, /run, /sys and /var, which hold data of users.
    words = [bubblewrap, *(word for path in _SYSTEM for word in ("--ro-bind-try", path, path))]
    words += ["--proc", "/proc", "--dev", "/dev", "--size", str(_SHARED_MIB << 20), "--tmpfs", "/dev/shm"]
    words += ["--perms", "1777", "--size", str(limits.disk_mib << 20), "--tmpfs", _FOLDER]
    if not any(path.startswith("/tmp/") for path in pythons):
        words += ["--symlink", _FOLDER, "/tmp"]
    for path in pythons:
        words += ["--ro-bind", f"{_OPEN_FOLDER}{path}" if is_root else path, path]
    for name, descriptor in zip(files, descriptors[2:]):
        words += ["--file", str(descriptor), f"{_FOLDER}/{name}"]
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", _FOLDER, "--hostname", "sandbox"]
    words += ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"]
    words += ["--new-session", "--die-with-parent", "--as-pid-1"]
    words += ["--json-status-fd", str(status), "--seccomp", str(descriptors[1]), "--", *_prlimit(limits)]
    if tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= _COUNTED_PER_NAMESPACE:
        words += [f"--nproc={limits.processes + 1}"]
    # Most signals do nothing to the first process of a namespace, so the program is the second one.
    words += ["--", "/bin/sh", "-c", '"$@"; exit $?', "sh", *program]
    words = [*_FIRST_TO_GO, *(_as_nobody(words, pythons) if is_root else words)]
    return _Command(words, "/", _FOLDER, descriptors, status)


def _as_nobody(words: Sequence[str], pythons: Sequence[str]) -> list[str]:
    """Return a command of root's that runs another one as nobody, who sees Pythons of root in a mount of their own."""
    opening = ["umask 022", f"mount -t tmpfs sandbox {_OPEN_FOLDER}"]
    for path in map(shlex.quote, pythons):
        opening += [f"mkdir -p {_OPEN_FOLDER}{path}", f"mount --bind {path} {_OPEN_FOLDER}{path}"]
    opened = ["unshare", "--mount", "--", "/bin/sh", "-ec", "; ".join([*opening, 'exec "$@"']), "sh"]
    return [*opened, "setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--", *words]


def _limited(program: Sequence[str], files: Files, limits: Limits, cleanup: ExitStack) -> _Command:
    """Return a command that limits a program, in a temporary folder with `files`, and isolates it from nothing."""
    _warn_that_nothing_is_isolated()
    folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="arealite-sandbox-", ignore_cleanup_errors=True))
    for name, content in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(_encoded(content))
    return _Command([*_FIRST_TO_GO, *_prlimit(limits), "--", *program], folder, folder)


_FIRST_TO_GO = ("choom", "-n", "1000", "--")
"""Prelude of processes that the kernel kills first when memory runs out."""


def _prlimit(limits: Limits) -> list[str]:
    """Return the prelude that sets the limits of each process, which children inherit."""
    cpu_s = math.ceil(limits.cpu_s)  # SIGXCPU, and a second later SIGKILL
    sizes = [f"--as={limits.memory_mib << 20}", f"--fsize={limits.disk_mib << 20}"]
    return ["prlimit", f"--cpu={cpu_s}:{cpu_s + 1}", *sizes, f"--nofile={_MAX_OPEN}", "--core=0"]


@functools.cache
def _syscall_filter() -> bytes:
    """Return the kernel's filter program: denied system calls fail, sockets are local and small."""
    try:
        import pyseccomp as seccomp  # loads the C library
    except (ImportError, RuntimeError) as error:
        raise EnvError(f"libseccomp must be installed for a sandbox: got {error}. {_ADVICE}.") from error
    refused = seccomp.ERRNO(errno.EPERM)
    program = seccomp.SyscallFilter(seccomp.ALLOW)
    for name in _DENIED:
        program.add_rule(refused, name)
    program.add_rule(refused, "socket", seccomp.Arg(0, seccomp.NE, socket.AF_UNIX))
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        program.add_rule(refused, "setsockopt", seccomp.Arg(2, seccomp.EQ, option))
    with tempfile.TemporaryFile() as file:
        program.export_bpf(file)
        file.seek(0)
        return file.read()


def _memory_file(content: str | bytes) -> int:
    """Return a sealed file in memory with this content, at its beginning."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(_encoded(content))
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _encoded(content: str | bytes) -> bytes:
    return content.encode(errors="surrogatepass") if isinstance(content, str) else content


@functools.cache
def _warn_that_nothing_is_isolated() -> None:
    logger.warning('isolation="process": programs are limited, and may read, write and send whatever you may.')
