"""The benchmarks of the runtime and of logprobs run: what they measure is judged by people, on a quiet machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def measured(out: Path, *command: str) -> Any:
    """Run a benchmark that writes one line, and return it."""
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent), "OMP_NUM_THREADS": "1"}
    whole = [sys.executable, BENCHMARKS / command[0], *command[1:], "--out", out]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = [json.loads(line) for line in out.read_text().splitlines()]
    return found


def test_logprobs_are_measured(tmp_path: Path) -> None:
    sizes = ["--tokens", "512", "--hidden", "8", "--vocabulary", "100000", "--rounds", "1"]
    found = measured(tmp_path / "found.jsonl", "logprob_memory.py", *sizes)
    assert found["gradient_distance"] < 1e-6 and found["memory_ratio"] > 1


def test_the_runtime_is_measured(tmp_path: Path) -> None:
    found = measured(tmp_path / "found.jsonl", "runtime_overhead.py", "--seconds", "0.1", "--case", "throughput")
    assert found["episodes"] % 256 == 0 and found["episodes"] > 0
    assert {"arealite-rollout", "arealite-ledger", "MainThread"} <= found["cpu_us_by_thread"].keys()
