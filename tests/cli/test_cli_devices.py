"""`arealite devices`: what there is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from arealite.cli.main import main


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that gives this node GPUs, by their free memory in MiB."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("COLUMNS", "120")

    def with_gpus(*free: int) -> None:
        rows = "".join(f"{i}, GPU-{i}, NVIDIA A100, 40960, {one}\n" for i, one in enumerate(free))
        (tmp_path / "bin").mkdir(exist_ok=True)
        program = tmp_path / "bin" / "nvidia-smi"
        names = "".join(f"GPU {i}: A100\n" for i in range(len(free)))
        program.write_text(f"#!/bin/sh\nif [ \"$1\" = -L ]; then printf '{names}'; else printf '{rows}'; fi\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    return with_gpus


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return "\n".join(" ".join(line.split()) for line in capsys.readouterr().out.splitlines())


def test_a_node_without_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["devices"]) == 0
    told = shown(capsys)
    assert f"this node {len(os.sched_getaffinity(0))} CPU cores" in told and "no GPU that nvidia-smi lists" in told


def test_gpus_of_a_node(node, capsys: pytest.CaptureFixture[str]) -> None:
    node(40000, 40000, 40000, 20)
    assert main(["devices"]) == 0
    assert "GPU 3 NVIDIA A100 40.0 GiB 0.0 GiB" in shown(capsys)
