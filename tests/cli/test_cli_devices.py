"""`arealite devices`: what there is, and what goes where."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from arealite.api.config.run import load_run_config
from arealite.cli.devices import placements
from arealite.cli.main import main
from arealite.launcher.plan.plan import checked_plan
from arealite.utils.devices import this_node

CONFIG = """
experiment_name: e
trial_name: t
allocation_mode: vllm.d1t2+d2
cluster: {n_gpus_per_node: 4}
gconfig: {max_new_tokens: 64}
train_dataset: {path: gsm8k, batch_size: 8, max_length: 64}
"""


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


def test_gpus_of_a_node(node, capsys: pytest.CaptureFixture[str]) -> None:
    node(40000, 40000, 40000, 20)
    assert main(["devices"]) == 0
    assert "GPU 3 NVIDIA A100 40.0 GiB 0.0 GiB" in shown(capsys)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("allocation_mode=d2", "rollout.server_addrs=a:1"),
            "trainer-0 0 GPU 0 NVIDIA A100 39.1 GiB\ntrainer-1 0 GPU 1 NVIDIA A100 39.1 GiB",
        ),
        (
            ("cluster.n_gpus_per_node=0", "allocation_mode=lite.d1+d2"),
            r"server-0 0 CPU cores \S+ GiB\ntrainer-0 0 CPU cores \S+ GiB\ntrainer-1 0 CPU cores",
        ),
    ],
)
def test_which_process_gets_which_device(
    words: tuple[str, ...], told: str, node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node(40000, 40000, 40000, 20)
    config = load_run_config(["--config", str(tmp_path / "config.yaml"), f"actor.path={tmp_path}", *words])
    Console().print(placements(config, checked_plan(config), this_node()))
    assert re.search(told, shown(capsys))
