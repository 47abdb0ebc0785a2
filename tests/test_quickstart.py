"""What `make quickstart` promises, on several seeds: it learns, and nothing happens without a learning rate."""

import json
from pathlib import Path
from typing import Any

import pytest
from testing_runs import arealite

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("quickstart")]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else runs, so threads may wait as they do for users."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)


def quickstart(fileroot: Path, *overrides: str) -> dict[str, Any]:
    output = arealite("quickstart", f"fileroot={fileroot}", "trial_name=t", *overrides)
    folder = fileroot / "quickstart" / "t"
    assert {path.name for path in folder.parent.iterdir()} == {"t-model", "t-sft", "t"}
    assert f"{folder}/report.html\n" in output
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_accuracy_rises_within_the_staleness_bound(tmp_path: Path, seed: int) -> None:
    summary = quickstart(tmp_path, f"seed={seed}")
    print({key: summary[key] for key in ("accuracy_before", "accuracy_after", "wall_s")})
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.3
    assert summary["completion_tokens_after"] > 2 * summary["completion_tokens_before"]
    assert 0 < summary["staleness_max"] <= summary["max_head_offpolicyness"]
    assert summary["trained_tokens"] < summary["generated_tokens"]
    assert summary["steps"] > 0 and summary["wall_s"] > summary["sft_s"] + summary["rl_s"]
    again = arealite("quickstart", f"fileroot={tmp_path}", "trial_name=t", status=2)
    assert "trial_name must be new" in again


def test_nothing_is_learned_without_a_learning_rate(tmp_path: Path) -> None:
    summary = quickstart(tmp_path, "seed=1", "actor.optimizer.lr=0")
    assert abs(summary["accuracy_after"] - summary["accuracy_before"]) < 0.1
