"""Every way out of the sandbox that we know, tried from inside: `make test-sandbox`.

docs/security.md lists them by the names below, with their results. An attack prints how each attempt went, so that one
that was never made is noticed.
"""

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from arealite.reward.sandbox import Limits, Sandbox, SandboxResult, python
from arealite.utils.processes import descendants, wait_gone

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "security.md").read_text()

HARNESS = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)

def attempt(what, action):
    try:
        done = action()
    except OSError as error:
        print("refused", what, error.strerror)
    else:
        print("ESCAPED", what, repr(done)[:200])

def call(number, *arguments):
    "Make a system call by its number on x86_64."
    result = libc.syscall(number, *[ctypes.c_long(one) if isinstance(one, int) else one for one in arguments])
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""

REFUSED = {
    "files of others": """
for path in (HOST_FILE, "/etc/passwd", "/etc/shadow", "/root/.ssh", "/root/.bashrc", "/home", "/var", "/run", "/sys"):
    attempt(path, lambda: os.stat(path))
""",
    "writing to the system": """
for path in ("/usr/bin/x", "/bin/x", "/x", "/etc/x", "/dev/x", "/proc/x", sys.prefix + "/x", sys.base_prefix + "/x"):
    attempt(path, lambda: open(path, "w"))
attempt("chmod", lambda: os.chmod(sys.executable, 0o777))
attempt("remove", lambda: os.unlink(os.__file__))
""",
    "links out of the folder": """
os.symlink(HOST_FILE, "link")
os.symlink("/proc/1/root" + HOST_FILE, "link2")
os.symlink("/", "root")
for path in ("link", "link2", "root" + HOST_FILE, "../../.." + HOST_FILE, "/proc/self/root" + HOST_FILE,
             "/proc/1/cwd/.." + HOST_FILE, "/proc/1/fd/5", "/oldroot" + HOST_FILE, "/newroot"):
    attempt(path, lambda: open(path).read())
attempt("hard link to a program", lambda: os.link("/usr/bin/env", "env"))
""",
    "/proc": """
pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
print("refused" if pids == [1, 2] else "ESCAPED", "processes of the host", pids)
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/vm/drop_caches",
             "/proc/sysrq-trigger", "/proc/irq/default_smp_affinity", "/proc/1/uid_map", "/proc/self/setgroups"):
    attempt("write " + path, lambda: os.write(os.open(path, os.O_WRONLY), b"0"))
for path in ("/proc/kcore", "/proc/kmsg", "/proc/kpagecount", "/proc/kpageflags", "/proc/1/stack"):
    attempt("read " + path, lambda: os.read(os.open(path, os.O_RDONLY), 1))
""",
    "devices": """
for path in ("/dev/mem", "/dev/kmsg", "/dev/kvm", "/dev/fuse", "/dev/nvidia0", "/dev/vda", "/dev/sda"):
    attempt(path, lambda: os.open(path, os.O_RDONLY))
attempt("mknod", lambda: os.mknod("disk", 0o60666, os.makedev(254, 0)))
attempt("terminal", lambda: os.open("/dev/tty", os.O_RDWR))
""",
    "network": """
for address in (("127.0.0.1", HOST_PORT), ("192.0.2.1", 80), ("1.1.1.1", 53)):
    attempt(address, lambda: socket.create_connection(address, timeout=2))
attempt("UDP", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("1.1.1.1", 53)))
attempt("IPv6", lambda: socket.create_connection(("::1", HOST_PORT), timeout=2))
attempt("names", lambda: socket.getaddrinfo("example.com", 80))
attempt("abstract socket", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + HOST_SOCKET))
attempt("socket file", lambda: socket.socket(socket.AF_UNIX).connect(HOST_SOCKET))
attempt("large buffers", lambda: socket.socket(socket.AF_UNIX).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24))
for family in (socket.AF_VSOCK, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_ALG):
    attempt(family, lambda: socket.socket(family, socket.SOCK_RAW))
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
""",
    "signals to others": """
for pid in (HOST_PID, HOST_PID + 1, 4):
    attempt(pid, lambda: os.kill(pid, 9))
attempt("group", lambda: os.killpg(HOST_PID, 9))
attempt("pidfd", lambda: os.pidfd_open(HOST_PID))
""",
    "ptrace": """
attempt("attach", lambda: call(101, 16, 1, 0, 0))
attempt("seize", lambda: call(101, 0x4206, 1, 0, 0))
attempt("traceme", lambda: call(101, 0, 0, 0, 0))
buffer = ctypes.create_string_buffer(16)
attempt("process_vm_readv", lambda: call(310, 1, buffer, 1, buffer, 1, 0))
attempt("process_vm_writev", lambda: call(311, 1, buffer, 1, buffer, 1, 0))
attempt("kcmp", lambda: call(312, 1, 2, 0, 0, 0))
""",
    "setuid and capabilities": """
attempt("root", lambda: os.setuid(0))
attempt("group root", lambda: os.setgid(0))
attempt("groups", lambda: os.setgroups([0]))
attempt("host's user", lambda: os.setuid(65534))
attempt("chown", lambda: (open("mine", "w"), os.chown("mine", 0, 0)))
os.system("cp /usr/bin/env env; chmod 6777 env")
attempt("capability to bind", lambda: call(126, ctypes.create_string_buffer(b"\\x22\\x05\\x08\\x20" + b"\\0" * 4),
        ctypes.create_string_buffer(b"\\xff" * 24)))
import subprocess
for program in (["su", "-c", "id"], ["mount", "-t", "tmpfs", "x", "/sandbox"], ["/sandbox/env", "id", "-u", "0"]):
    status = subprocess.run(program, capture_output=True, stdin=subprocess.DEVNULL)
    print("refused" if status.returncode or b"uid=0" not in status.stdout else "ESCAPED", program)
""",
    "namespaces and mounts": """
for name, flag in (("user", 0x10000000), ("mount", 0x20000), ("pid", 0x20000000), ("network", 0x40000000)):
    attempt("unshare " + name, lambda: call(272, flag))
    attempt("clone " + name, lambda: call(56, flag | 17, 0, 0, 0, 0) or os._exit(0))
attempt("clone3 user", lambda: call(435, ctypes.create_string_buffer((0x10000000).to_bytes(8, "little") + b"\\0" * 24
        + (17).to_bytes(8, "little") + b"\\0" * 48), 88) or os._exit(0))
attempt("setns", lambda: call(308, os.open("/proc/1/ns/mnt", 0), 0))
attempt("mount", lambda: call(165, b"proc", b"/sandbox", b"proc", 0, 0))
attempt("remount", lambda: call(165, b"", b"/usr", b"", 0x1021, 0))
attempt("umount", lambda: call(166, b"/sandbox", 2))
attempt("pivot_root", lambda: call(155, b"/sandbox", b"/sandbox"))
attempt("chroot", lambda: os.chroot("/sandbox"))
attempt("fsopen", lambda: call(430, b"tmpfs", 0))
attempt("open_tree", lambda: call(428, -100, b"/", 1))
handle = ctypes.create_string_buffer(b"\\x08\\0\\0\\0\\x01\\0\\0\\0\\x02" + b"\\0" * 20)
attempt("file handle", lambda: call(304, -100, handle, 0))
""",
    "doors into the kernel": """
buffer = ctypes.create_string_buffer(256)
for name, number, *arguments in (
    ("bpf", 321, 0, buffer, 128), ("perf", 298, buffer, 0, -1, -1, 0), ("userfaultfd", 323, 1),
    ("io_uring", 425, 8, buffer), ("add_key", 248, b"user", b"x", b"y", 1, -3), ("keyctl", 250, 0, -3, 1),
    ("request_key", 249, b"user", b"x", None, -3), ("syslog", 103, 3, buffer, 256), ("memfd", 319, b"x", 0),
    ("memfd_secret", 447, 0), ("shmget", 29, 1, 4096, 0o1600), ("msgget", 68, 1, 0o1600),
    ("kexec", 246, 0, 0, 0, 0), ("init_module", 175, buffer, 256, b""),
    ("reboot", 169, 0, 0, 0), ("settimeofday", 164, buffer, 0), ("sethostname", 170, b"x", 1),
    ("swapon", 167, b"/sandbox", 0), ("acct", 163, b"/sandbox"), ("iopl", 172, 3), ("quotactl", 179, 0, 0, 0, 0),
):
    attempt(name, lambda: call(number, *arguments))
""",
    "more than its share": """
import resource
def setrlimit(kind):
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except ValueError as error:
        raise OSError(1, str(error))
for name in ("AS", "CPU", "FSIZE", "NPROC", "NOFILE", "CORE"):
    attempt(name, lambda: setrlimit(getattr(resource, "RLIMIT_" + name)))
attempt("nice", lambda: os.nice(-5))
attempt("real time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt("oom_score", lambda: os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"-1000"))
attempt("mlock", lambda: call(151, 3))
""",
    "stdin": """
attempt("write", lambda: os.write(0, b"x"))
attempt("grow", lambda: os.ftruncate(os.open("/dev/stdin", os.O_RDWR), 2**20))
attempt("map", lambda: __import__("mmap").mmap(0, 5))
""",
}

ENDED = {
    "hanging": ("import time; time.sleep(600)", {"time"}, 0),
    "hanging without output": ("import os, time; os.close(1); os.close(2); time.sleep(600)", {"time"}, 0),
    "ignoring signals": (
        "import signal\nfor n in {*signal.valid_signals()} - {9, 19}: signal.signal(n, signal.SIG_IGN)\nsignal.pause()",
        {"time"},
        0,
    ),
    "stopping itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", {"time"}, 0),
    "computing": ("while True: pass", {"cpu"}, 0),
    "computing in many processes": ("import os\nfor _ in range(4): os.fork()\nwhile True: pass", {"cpu", "time"}, 0),
    "a fork bomb": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: print('refused', flush=True)",
        {"cpu", "time", "output"},
        0,
    ),
    "a fork bomb of threads": (
        "import threading\nwait = threading.Event().wait\nwhile True:\n    try: threading.Thread(target=wait).start()\n"
        "    except RuntimeError: print('refused', flush=True); wait()",
        {"time"},
        0,
    ),
    "memory in one process": ("try: x = bytearray(2**40)\nexcept MemoryError: print('refused')", {None}, 0),
    "a full disk": (
        "try:\n    for n in range(100): open(f'{n}', 'wb').write(bytes(4 << 20))\nexcept OSError: print('refused')",
        {None},
        0,
    ),
    "a full /dev/shm": (
        "try:\n    for n in range(100): open(f'/dev/shm/{n}', 'wb').write(bytes(4 << 20))\n"
        "except OSError: print('refused')",
        {None},
        0,
    ),
    "a large file": (
        "try: open('x', 'wb').truncate(2**40)\nexcept OSError: print('refused')",
        {None},
        0,
    ),
    "many empty files": ("n = 0\nwhile True: open(str(n), 'w').close(); n += 1", {"cpu", "time"}, 0),
    "floods of output": ("import os\nwhile True: os.write(1, b'x' * 65536)", {"output"}, 64 << 10),
    "floods of errors": ("import os\nwhile True: os.write(2, b'x' * 65536)", {"output"}, 64 << 10),
    "daemons": (
        "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(600)",
        {None},
        0,
    ),
    "zombies": (
        "import os, time\nfor _ in range(20):\n    if os.fork() == 0: os._exit(0)\nprint('left')",
        {None},
        0,
    ),
    "system calls of another architecture": (
        "import ctypes, mmap\npage = mmap.mmap(-1, 4096, prot=7)\npage.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()\nprint('ESCAPED')",
        {None},
        0,
    ),
    "system calls by numbers of x32": (
        "import ctypes\nctypes.CDLL(None).syscall(0x40000027)\nprint('ESCAPED')",
        {None},
        0,
    ),
}
"""Programs, the limits for which they may be ended (None: they end themselves), and what they may have written."""

LIMITS = Limits(time_s=60, cpu_s=1, memory_mib=512, disk_mib=16)
HANGING = replace(LIMITS, time_s=2)


@pytest.fixture
def token() -> Iterator[str]:
    """Return an argument for programs, none of which may be left after the test."""
    token = f"sandboxed-{time.monotonic_ns()}"
    before = set(descendants(os.getpid()))
    yield token
    assert wait_gone(named(token), timeout_s=60) == set(), "processes are left"
    assert {pid for pid in descendants(os.getpid()) if pid not in before} == set()


def named(token: str) -> list[int]:
    """Find the processes with that argument, zombies included."""
    found = []
    for process in psutil.process_iter():
        try:
            found += [process.pid] * (token in process.cmdline())
        except psutil.Error:
            continue
    return found


def run(program: str, token: str, limits: Limits = LIMITS) -> SandboxResult:
    return Sandbox(limits).run_here([python(), "main.py", token], files={"main.py": program}, stdin="given")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[str]:
    """Return a program's first lines, which tell it what there is to reach."""
    file, name = tmp_path / "canary", str(tmp_path / "socket")
    file.write_text("canary")
    file.chmod(0o666)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as with_a_file,
    ):
        for one, address in ((abstract, "\0" + name), (with_a_file, name)):
            one.bind(address)
            one.listen()
        facts = f"HOST_FILE, HOST_PORT, HOST_PID = {str(file)!r}, {server.getsockname()[1]}, {os.getpid()}"
        yield f"{facts}\nHOST_SOCKET = {name!r}\n{HARNESS}"
    assert file.read_text() == "canary"


@pytest.mark.parametrize("name", REFUSED)
def test_what_reaches_out_is_refused(name: str, host: str, token: str) -> None:
    result = run(host + REFUSED[name], token)
    assert result.exit_status == 0 and result.reason is None, result
    assert "ESCAPED" not in result.stdout, result.stdout
    tried = REFUSED[name].count("attempt(") + REFUSED[name].count('print("refused"')
    assert result.stdout.count("refused") >= tried, f"not everything was tried: {result}"


def test_the_attempts_succeed_where_nothing_is_isolated(host: str, token: str) -> None:
    """Else the refusals above would say nothing."""
    program = host + REFUSED["network"] + REFUSED["links out of the folder"]
    result = Sandbox(LIMITS, isolation="process").run_here([python(), "main.py", token], files={"main.py": program})
    for what in ("('127.0.0.1', ", "abstract socket", "socket file", "link 'canary'"):
        assert f"ESCAPED {what}" in result.stdout, result


@pytest.mark.parametrize("name", ENDED)
def test_what_takes_too_much_is_ended(name: str, token: str) -> None:
    program, reasons, written = ENDED[name]
    result = run(program, token, HANGING if "time" in reasons else LIMITS)
    assert result.reason in reasons, result
    if "refused" in program:
        assert "refused" in result.stdout, result
    assert "ESCAPED" not in result.stdout
    assert max(len(result.stdout), len(result.stderr)) >= written
    assert max(len(result.stdout), len(result.stderr)) <= LIMITS.output_kib << 10


def test_no_secret_is_in_the_environment(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    for variable in ("AREALITE_SECRET", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "SECRET"):
        monkeypatch.setenv(variable, "canary")
    result = run("import os\nprint(os.environ, [open(f'/proc/{n}/environ').read() for n in (1, 2)])", token)
    assert "PATH" in result.stdout and "canary" not in result.stdout + result.stderr, result


def test_no_file_is_inherited(tmp_path: Path, token: str) -> None:
    with open(tmp_path / "secret", "w") as file, socket.create_server(("127.0.0.1", 0)) as server:
        os.set_inheritable(file.fileno(), True)
        server.set_inheritable(True)
        result = run("import os; print([os.listdir(f'/proc/{n}/fd') for n in (1, 2)])", token)
    assert result.stdout == "[['0', '1', '2'], ['0', '1', '2', '3']]\n", result


CALLER = """
import sys
from arealite.reward.sandbox import Sandbox, python
Sandbox().run_here([python(), "-c", "import time; time.sleep(600)", sys.argv[1]])
"""


def wait_for(token: str, number: int) -> list[int]:
    deadline = time.monotonic() + 120
    while len(found := named(token)) < number and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_a_program_ends_with_its_caller(token: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    caller = subprocess.Popen([sys.executable, "-c", CALLER, token], env=environment)
    assert len(wait_for(token, 4)) >= 4, "the caller, bubblewrap, the first process, and the program"
    caller.kill()
    caller.wait(60)


async def test_a_program_ends_when_nobody_waits_for_it(token: str) -> None:
    command = [python(), "-c", "import time; time.sleep(600)", token]
    task = asyncio.create_task(Sandbox().run(command))
    while not named(token):
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_every_attack_is_told() -> None:
    table = re.findall(r"^\| ([^|]+?) \|", PAGE, re.MULTILINE)
    assert {*REFUSED, *ENDED} <= {*table}
