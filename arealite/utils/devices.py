"""The resources of this node: GPUs from nvidia-smi, cores, and memory within the limit of the container."""

import itertools
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

_QUERY = ("index", "uuid", "memory.total", "memory.free")
_GPU = re.compile(r"\d+$|GPU-|MIG-")
_TIMEOUT_S = 60.0  # a driver that was just loaded is slow
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Gpu:
    """A GPU; memory in bytes."""

    index: str
    memory: int
    free: int


@dataclass(frozen=True)
class Node:
    """Resources that processes of this node may use; memory in bytes."""

    gpus: tuple[Gpu, ...]
    memory: int
    free: int


def this_node() -> Node:
    """Return the resources of this node; CUDA_VISIBLE_DEVICES limits the GPUs."""
    memory = psutil.virtual_memory()
    limit, used = (_bytes_of(name) for name in ("memory.max", "memory.current"))
    total, free = memory.total, memory.available
    if limit is not None and limit < total:
        total, free = limit, min(free, limit - (used or 0) + _cached_bytes())
    return Node(gpus(), total, max(0, free))


def visible_gpus() -> list[str]:
    """Return the names of the GPUs this process may use."""
    if (names := _visible_devices()) is not None:
        return names
    num_gpus = sum(line.startswith("GPU ") for line in _ask_nvidia_smi("-L"))
    return [str(index) for index in range(num_gpus)]


def gpus() -> tuple[Gpu, ...]:
    """Return the visible GPUs; none if nvidia-smi is missing or fails."""
    by_name: dict[str, Gpu] = {}  # by index and by UUID
    for line in _ask_nvidia_smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(_QUERY) and fields[2].isdecimal() and fields[3].isdecimal():
            gpu = Gpu(fields[0], int(fields[2]) * 2**20, int(fields[3]) * 2**20)
            by_name |= {fields[0]: gpu, fields[1]: gpu}
    names = _visible_devices()
    if names is None:
        names = [name for name in by_name if name.isdecimal()]
    return tuple(by_name[name] for name in names if name in by_name)


def _ask_nvidia_smi(*flags: str) -> list[str]:
    """Return the lines of nvidia-smi; none if it is missing or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *flags], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _visible_devices() -> list[str] | None:
    """Return CUDA_VISIBLE_DEVICES up to the first entry that is not a GPU, such as -1; None if it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [*itertools.takewhile(_GPU.match, map(str.strip, value.split(",")))]


def _cached_bytes() -> int:
    """Return the file cache of this container's control group, which the kernel drops under memory pressure."""
    try:
        fields = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return int(fields["active_file"]) + int(fields["inactive_file"])


def _bytes_of(name: str) -> int | None:
    """Read a number of this container's control group; None without one."""
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
