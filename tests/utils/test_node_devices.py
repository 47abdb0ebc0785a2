"""What a node has, as nvidia-smi and the control group tell it."""

import os
from pathlib import Path

import psutil
import pytest

from arealite.utils import devices
from arealite.utils.devices import Gpu, gpus, this_node, visible_gpus

TWO = "0, GPU-aa, 81559, 81000\n1, GPU-bb, 81559, 1024\n"
FIRST, SECOND = Gpu("0", 81559 * 2**20, 81000 * 2**20), Gpu("1", 81559 * 2**20, 1024 * 2**20)


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that puts an nvidia-smi on the path that prints something and exits with a status."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def say(text: str, status: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nprintf '%s' '{text}'\nexit {status}\n")
        program.chmod(0o755)

    return say


def test_gpus_are_those_that_cuda_shows(says, monkeypatch: pytest.MonkeyPatch) -> None:
    says(TWO)
    assert gpus() == (FIRST, SECOND)
    for chosen, expected in (("1,0", (SECOND, FIRST)), ("GPU-bb", (SECOND,)), ("", ()), ("7", ())):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert gpus() == expected, chosen


@pytest.mark.parametrize(
    ("chosen", "names"), [("-1", []), ("NoDevFiles", []), ("1,-1,0", ["1"]), ("0, GPU-bb", ["0", "GPU-bb"])]
)
def test_a_name_that_cuda_does_not_know_ends_the_list(
    monkeypatch: pytest.MonkeyPatch, chosen: str, names: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == names


def test_an_nvidia_smi_that_can_not_run_shows_no_gpu(says, tmp_path: Path) -> None:
    says(TWO)
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF of another machine")
    assert visible_gpus() == [] and gpus() == ()


@pytest.mark.parametrize(
    ("text", "status"),
    [("NVIDIA-SMI has failed", 9), ("No devices were found\n", 0), ("0, GPU-aa, [N/A], [N/A]\n", 0), (TWO, 1)],
)
def test_no_gpu_is_made_up(says, text: str, status: int) -> None:
    says(text, status)
    assert gpus() == ()


def test_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_CGROUP", tmp_path)
    assert this_node().memory == psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("max\n")
    assert this_node().memory == psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text(f"{2**28}\n")
    (tmp_path / "memory.current").write_text(f"{2**27}\n")
    node = this_node()
    assert (node.memory, node.free) == (2**28, 2**27)
    of_files = f"anon {2**26}\nfile {2**26}\ninactive_file {2**25}\nactive_file {2**24}\n"  # as after a download
    (tmp_path / "memory.stat").write_text(of_files)
    assert this_node().free == 2**27 + 2**25 + 2**24
