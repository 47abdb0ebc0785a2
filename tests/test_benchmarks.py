"""The benchmark of the runtime runs: what it measures is judged by people, on a quiet machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "runtime_overhead.py"


def test_the_runtime_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, PROGRAM, "--seconds", "0.1", "--case", "throughput", "--out", tmp_path / "found.jsonl"]
    environment = os.environ | {"PYTHONPATH": str(PROGRAM.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert found["episodes"] % 256 == 0 and found["episodes"] > 0
    assert {"arealite-rollout", "arealite-ledger", "MainThread"} <= found["cpu_us_by_thread"].keys()
