"""Which GPUs workers see under the local and the Ray launcher, whose master has none: real processes, GPUs by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from cluster.ray_cluster import ray_cluster

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import json, os, pathlib, sys
import ray
from arealite.api.cli_args import DPOConfig, load_expr_config
from arealite.core.worker import Call
from arealite.core.workers import Workers
from arealite.launcher.start import launched

class Probe:
    def __init__(self, config): self.path = config.path
    def look(self): return [os.environ["CUDA_VISIBLE_DEVICES"], ray.get_runtime_context().get_node_id(), self.path]

def main(argv):
    config, _ = load_expr_config(argv, DPOConfig)
    with Workers(config) as workers:
        told = {"master": os.environ["CUDA_VISIBLE_DEVICES"]}
        for role in ("ref", "model"):
            engine = workers.engine(role, Probe, getattr(config, role))
            outcomes = engine.group.submit(Call("look", role, "look")).values.result()
            told[role] = [outcome.value for outcome in outcomes]
    pathlib.Path("told.json").write_text(json.dumps(told))

if __name__ == "__main__":
    sys.exit(launched(__file__, main))
"""
CONFIG = """
experiment_name: e
trial_name: t
allocation_mode: d3
cluster: {fileroot: .}
model: {path: org/name}
train_dataset: {path: none.jsonl}
launcher: {preflight: false, trainer_cpus_per_gpu: 1}
workers: {ref: {ranks: 1}}
"""
pytestmark = pytest.mark.slow


def run(folder: Path, *overrides: str, **variables: str) -> dict[str, Any]:
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "look.py").write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "RAY_ADDRESS")}
    command = [sys.executable, "look.py", "--config", "config.yaml", *overrides]
    done = subprocess.run(
        command,
        cwd=folder,
        env=env | {"PYTHONPATH": str(REPOSITORY)} | variables,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return told


def test_the_local_master_leaves_its_gpus_to_the_workers(tmp_path: Path) -> None:
    told = run(tmp_path, "allocation_mode=d1", "cluster.n_gpus_per_node=2", CUDA_VISIBLE_DEVICES="3,4,5")
    gpus = [gpu for role in ("model", "ref") for gpu, _, _ in told[role]]
    assert (told["master"], sorted(gpus)) == ("", ["3", "4"])


@pytest.mark.long
def test_a_ray_cluster_has_gpus_for_workers_alone(tmp_path: Path) -> None:
    """As many as all nodes have: were one kept for the master, the last worker would find none."""
    with ray_cluster() as cluster:
        cluster.add("one", "two", gpus=2)
        told = run(
            tmp_path, *("mode=ray", "cluster.n_nodes=2", "cluster.n_gpus_per_node=2"), RAY_ADDRESS=cluster.address
        )
    found = [(node, gpu) for role in ("model", "ref") for gpu, node, _ in told[role]]
    assert told["master"] == ""
    assert len({*found}) == 4 and sorted(gpu for _, gpu in found) == ["0", "0", "1", "1"]
