"""What this node has: GPUs as nvidia-smi tells them, cores, and memory within the limit of its container."""

import itertools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

_QUERY = ("index", "uuid", "name", "memory.total", "memory.free")
_GPU = re.compile(r"\d+$|GPU-|MIG-")
_TIMEOUT_S = 60.0  # the driver of a node that has just started takes its time
_MEBIBYTE = 2**20
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Gpu:
    """A GPU; memory in bytes."""

    index: str
    name: str
    memory: int
    free: int


@dataclass(frozen=True)
class Node:
    """What processes of this node may use; memory in bytes."""

    gpus: tuple[Gpu, ...]
    cores: int
    memory: int
    free: int


def this_node() -> Node:
    """Look at this node; only GPUs that CUDA_VISIBLE_DEVICES names count, if it is set."""
    memory = psutil.virtual_memory()
    limit, used = (_bytes_of(name) for name in ("memory.max", "memory.current"))
    total, free = memory.total, memory.available
    if limit is not None and limit < total:
        total, free = limit, min(free, limit - (used or 0) + _cached_bytes())
    return Node(gpus(), len(os.sched_getaffinity(0)), total, max(0, free))


def visible_gpus() -> list[str]:
    """Return the names of the GPUs this process may use."""
    if (chosen := _chosen()) is not None:
        return chosen
    listed = [line for line in _ask_nvidia_smi("-L") if line.startswith("GPU ")]
    return [str(index) for index, _ in enumerate(listed)]


def gpus() -> tuple[Gpu, ...]:
    """Ask nvidia-smi for the visible GPUs; without it, or where it fails, there are none."""
    found: dict[str, Gpu] = {}
    for line in _ask_nvidia_smi(f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(_QUERY) and fields[3].isdecimal() and fields[4].isdecimal():
            gpu = Gpu(fields[0], fields[2], int(fields[3]) * _MEBIBYTE, int(fields[4]) * _MEBIBYTE)
            found |= {fields[0]: gpu, fields[1]: gpu}
    chosen = _chosen()
    names = [name for name in found if name.isdecimal()] if chosen is None else chosen
    return tuple(found[name] for name in names if name in found)


def _ask_nvidia_smi(*flags: str) -> list[str]:
    """Return the lines that nvidia-smi answers; none without it, or where it fails."""
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    try:
        done = subprocess.run([program, *flags], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _chosen() -> list[str] | None:
    """Return what CUDA_VISIBLE_DEVICES names; None if it is not set. CUDA reads it up to what is no GPU, such as -1."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str.strip, (chosen or "").split(","))
    return None if chosen is None else [*itertools.takewhile(_GPU.match, names)]


def _cached_bytes() -> int:
    """Return what this container's control group keeps of files, and drops when a process needs memory."""
    try:
        fields = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return int(fields["active_file"]) + int(fields["inactive_file"])


def _bytes_of(name: str) -> int | None:
    """Read a number of this container's control group; None if there is none."""
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
