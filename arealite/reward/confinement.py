"""Commands that confine another command: by bubblewrap and a filter of system calls, or by limits alone.

bubblewrap (Flatpak's) makes namespaces of users, processes, networks, mounts and IPC that hold nothing but the program.
Limits of a process are set inside, where they count the program's processes only.
"""

import fcntl
import functools
import logging
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields

from arealite.api.errors import ConfigError, EnvError
from arealite.reward.syscalls import syscall_filter

logger = logging.getLogger("arealite.sandbox")

NOBODY = 65534
"""The host's user of a sandbox that root starts: root owns too much of what namespaces share."""
SHARED_MIB = 16
"""Size of /dev/shm in a sandbox, where semaphores are."""
UNCONFINED = 'or write Sandbox(isolation="process"), which limits programs and isolates them from nothing'
ADVICE = (
    "Allow user namespaces: as root, `sysctl -w kernel.unprivileged_userns_clone=1` (Debian), "
    "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` (Ubuntu), `sysctl -w user.max_user_namespaces=15000` "
    "(Red Hat); for Docker, `--security-opt seccomp=unconfined --security-opt systempaths=unconfined`; " + UNCONFINED
)
FOLDER = "/sandbox"
"""Where a program may write; /tmp is the same, unless a Python lies there."""
_OPEN_FOLDER = "/media"  # where root shows nobody a Python that lies in a folder such as /root, seen by nobody else
_MAX_OPEN = 64  # files per process: each may be a socket, whose buffers nothing counts
_NEEDED = ("--size", "--disable-userns")
_COUNTED_PER_NAMESPACE = (5, 14)  # before this kernel the limit on processes counts all of the host's user
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


@dataclass(frozen=True)
class Limits:
    """What one program may take, with all the processes that it starts."""

    time_s: float = 10.0
    """Seconds by the clock."""
    cpu_s: float = 10.0
    """CPU seconds of all processes together."""
    memory_mib: int = 1024
    """Resident memory of all processes together, and address space of each."""
    disk_mib: int = 64
    """The writable folder, which is memory too, and each file."""
    processes: int = 32
    """Processes and threads at once."""
    output_kib: int = 64
    """Of stdout and of stderr, each."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < (value := getattr(self, field.name)) < math.inf:
                raise ConfigError(f"{field.name} of a sandbox must be positive: got {value}. Use {field.default}.")


@dataclass(frozen=True)
class Confined:
    """A command that confines another one, and what it needs."""

    command: list[str]
    folder: str
    environment: dict[str, str]
    descriptors: tuple[int, ...] = ()
    status: int | None = None
    """Where bubblewrap writes the program's pid and, once it could be started, how it ended; None without isolation."""


def in_bubblewrap(
    command: Sequence[str], files: Mapping[str, str | bytes], limits: Limits, cleanup: ExitStack
) -> Confined:
    """Isolate a command in namespaces of its own, with `files` in its folder."""
    is_root = os.geteuid() == 0
    descriptors = []

    def passed(descriptor: int) -> str:
        cleanup.callback(os.close, descriptor)
        descriptors.append(descriptor)
        return str(descriptor)

    status, theirs = os.pipe()
    cleanup.callback(os.close, status)
    its_status = passed(theirs)

    def bound(path: str, below: str = "") -> list[str]:
        return ["--ro-bind", f"{below}{path}", path]

    # The system without /etc, /home, /run, /sys and /var, where things lie that belong to somebody.
    words = [_bubblewrap(), *bound("/usr")]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += bound(path)
    for path in filter(os.path.exists, ("/etc/ld.so.cache", "/etc/alternatives")):
        words += bound(path)
    words += ["--proc", "/proc", "--dev", "/dev", "--size", str(SHARED_MIB << 20), "--tmpfs", "/dev/shm"]
    words += ["--perms", "1777", "--size", str(limits.disk_mib << 20), "--tmpfs", FOLDER]
    prefixes = sorted({os.path.realpath(path) for path in (sys.prefix, sys.base_prefix)})
    of_python = [path for path in prefixes if not f"{path}/".startswith("/usr/")]
    if not any(path.startswith("/tmp/") for path in of_python):
        words += ["--symlink", FOLDER, "/tmp"]
    for path in of_python:
        words += bound(path, _OPEN_FOLDER if is_root else "")
    for name, content in files.items():
        words += ["--file", passed(memory_file(content)), f"{FOLDER}/{name}"]
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", FOLDER, "--hostname", "sandbox"]
    words += ["--unshare-all", "--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000"]
    words += ["--new-session", "--die-with-parent", "--as-pid-1"]
    words += ["--seccomp", passed(memory_file(_syscall_filter())), "--json-status-fd", its_status, "--"]
    if is_root:
        words = [_found("setpriv"), f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--", *words]
        opening = ["umask 022", f"mount -t tmpfs sandbox {_OPEN_FOLDER}"]
        for path in map(shlex.quote, of_python):
            opening += [f"mkdir -p {_OPEN_FOLDER}{path}", f"mount --bind {path} {_OPEN_FOLDER}{path}"]
        words = [_found("unshare"), "--mount", "--", "/bin/sh", "-ec", "; ".join([*opening, 'exec "$@"']), "sh", *words]
    inside = _limited(limits)
    if tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= _COUNTED_PER_NAMESPACE:
        inside += [f"--nproc={limits.processes + 1}"]
    # Most signals do nothing to the first process of a namespace, so the program is the second one.
    inside += ["--", "/bin/sh", "-c", '"$@"; exit $?', "sh", *command]
    environment = _ENVIRONMENT | {"HOME": FOLDER, "TMPDIR": FOLDER}
    return Confined([*_first_to_go(), *words, *inside], "/", environment, tuple(descriptors), status)


def in_process(
    command: Sequence[str], files: Mapping[str, str | bytes], limits: Limits, cleanup: ExitStack
) -> Confined:
    """Limit a command, in a temporary folder with `files`, and isolate it from nothing."""
    _tell_that_nothing_is_isolated()
    folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="arealite-sandbox-", ignore_cleanup_errors=True))
    for name, content in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(_encoded(content))
    environment = _ENVIRONMENT | {"HOME": folder, "TMPDIR": folder}
    return Confined([*_first_to_go(), *_limited(limits), "--", *command], folder, environment)


def python() -> str:
    """Return the Python of this process by a path that exists in a sandbox, with the packages that it has."""
    return os.path.join(os.path.realpath(sys.prefix), "bin", f"python{sys.version_info.major}")


def memory_file(content: str | bytes) -> int:
    """Return a file of that content in memory, which nobody can change, at its beginning."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(_encoded(content))
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _encoded(content: str | bytes) -> bytes:
    return content.encode(errors="surrogatepass") if isinstance(content, str) else content


def _limited(limits: Limits) -> list[str]:
    """Return the prelude that sets limits of a process, which its children inherit."""
    return [
        _found("prlimit"),
        f"--as={limits.memory_mib << 20}",
        f"--cpu={math.ceil(limits.cpu_s) + 1}",
        f"--fsize={limits.disk_mib << 20}",
        f"--nofile={_MAX_OPEN}",
        "--core=0",
    ]


def _first_to_go() -> list[str]:
    """Return the prelude of what the kernel is to end first if memory runs out."""
    return [_found("choom"), "-n", "1000", "--"]


@functools.cache
def _syscall_filter() -> bytes:
    try:
        return syscall_filter(machine := platform.machine())
    except KeyError as error:
        raise EnvError(
            f"the processor must be known for a sandbox: got {machine}. Use x86_64 or aarch64, {UNCONFINED}."
        ) from error


@functools.cache
def _bubblewrap() -> str:
    path = shutil.which("bwrap")
    advice = f"Run `apt-get install bubblewrap` or `dnf install bubblewrap`, {UNCONFINED}."
    if path is None:
        raise EnvError(f"bubblewrap must be installed for a sandbox: got no bwrap on the PATH. {advice}")
    known = subprocess.run([path, "--help"], capture_output=True, text=True, check=False, timeout=60).stdout
    if missing := [option for option in _NEEDED if option not in known]:
        raise EnvError(f"bubblewrap must know {', '.join(missing)}: got an old {path}. {advice}")
    return path


def _found(name: str) -> str:
    if (path := shutil.which(name)) is None:
        raise EnvError(f"{name} must be installed for a sandbox: got none. Install util-linux.")
    return path


@functools.cache
def _tell_that_nothing_is_isolated() -> None:
    logger.warning('isolation="process": programs are limited, and may read, write and send whatever you may.')
