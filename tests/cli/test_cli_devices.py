"""`arealite devices`: what there is, what goes where, and what does not fit."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from testing_quickstart import make_tiny_model

from arealite.cli.main import main

CONFIG = """
experiment_name: e
trial_name: t
allocation_mode: vllm.d1t2+d2
cluster: {n_gpus_per_node: 4}
gconfig: {max_new_tokens: 64}
train_dataset: {path: gsm8k, batch_size: 8, max_length: 64}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("devices") / "tiny", layers=2)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that gives this node GPUs, by their free memory in MiB."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "config.yaml").write_text(CONFIG)

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
    assert f"this node {len(os.sched_getaffinity(0))} CPU cores" in told and "no GPU: nvidia-smi lists none" in told


def test_which_process_gets_which_gpu(node, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ["--config", str(tmp_path / "config.yaml"), f"actor.path={tiny}", "allocation_mode=d2"]
    path += ["rollout.server_addrs=a:1"]
    node(40000, 40000, 40000, 20)
    assert main(["devices", *path]) == 0, "nobody takes the GPU that is in use"
    told = shown(capsys)
    assert "GPU 3 NVIDIA A100 40.0 GiB 0.0 GiB" in told, "what a node has"
    assert "trainer-0 0 GPU 0 NVIDIA A100 39.1 GiB\ntrainer-1 0 GPU 1 NVIDIA A100 39.1 GiB" in told, "what goes where"
    assert "ok memory a trainer rank needs about 0." in told and "of 39.1 GiB" in told
    node(40000, 1, 40000, 40000)
    assert main(["devices", *path]) == 1
    told = shown(capsys)
    assert "warning memory GPU 1 has 0.0 of 40.0 GiB free" in told
    assert "PROBLEM memory a trainer rank needs about" in told and "of 0.0 GiB" in told, "before a model is loaded"


def test_more_gpus_than_there_are(node, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node(40000)
    path = ["--config", str(tmp_path / "config.yaml"), f"actor.path={tiny}"]
    assert main(["devices", *path, "allocation_mode=d2", "rollout.server_addrs=a:1"]) == 1
    assert "PROBLEM processes allocation_mode must fit the GPUs: got d2p1t1, which needs 2, and 1" in shown(capsys)


def test_a_cpu_run_fits(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    words = ["cluster.n_gpus_per_node=0", "allocation_mode=lite.d1+d2", "actor.dtype=float32", f"actor.path={tiny}"]
    assert main(["devices", "--config", str(tmp_path / "config.yaml"), *words]) == 0
    told = shown(capsys)
    assert re.search(r"server-0 0 CPU cores \S+ GiB\ntrainer-0 0 CPU cores \S+ GiB\ntrainer-1 0 CPU cores", told)
    assert "ok memory the run needs about 0." in told and "0 problems" in told
