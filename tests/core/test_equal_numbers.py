"""The example of ranks, and the same with the three lines changed that docs/core.md names: equal numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from testing_quickstart import WORD_PROBLEMS, write_tiny_model

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples" / "arealite"
SCORE = """
def score(prompt, completions, prompt_ids, completion_ids, **row):
    return float(sum(completion_ids) % 7) / 7
"""
MIGRATION = (
    (
        "    actor = FSDPPPOActor(config.actor)\n",
        "    workers = cleanup.enter_context(Workers(config))\n"
        '    actor = workers.engine("actor", FSDPPPOActor, config.actor)\n',
    ),
    ("        ref = FSDPPPOActor(config.ref)\n", '        ref = workers.engine("ref", FSDPPPOActor, config.ref)\n'),
    ("RemoteInferenceEngine(config.rollout)", "RemoteInferenceEngine(config.rollout, hand_out=workers.scatter)"),
    ("from arealite.dataset import", "from arealite.core.workers import Workers\nfrom arealite.dataset import"),
)
STEPS = 10
pytestmark = pytest.mark.slow


def migrated(folder: Path) -> Path:
    text = (EXAMPLES / "gsm8k_grpo.py").read_text()
    for before, after in MIGRATION:
        assert text.count(before) == 1 or before.startswith("from"), before
        text = text.replace(before, after, 1)
    path = folder / "gsm8k_grpo_core.py"
    path.write_text(text)
    return path


def train(folder: Path, trial: str, script: Path, *overrides: str) -> dict[str, Any]:
    """Train with a reward that always teaches something, and return what must not depend on the script."""
    (folder / "score.py").write_text(SCORE)
    command = [sys.executable, "-m", "arealite.launcher.local", str(script)]
    command += ["--config", str(EXAMPLES / "configs" / "gsm8k_grpo_cpu.yaml"), f"actor.path={folder / 'model'}"]
    command += [f"cluster.fileroot={folder}", "experiment_name=core", f"trial_name={trial}"]
    command += [f"total_train_steps={STEPS}", "train_dataset.batch_size=6", "gconfig.n_samples=4"]
    command += [f"train_dataset.path={WORD_PROBLEMS}?train=200&test=10", f"reward={folder / 'score.py'}:score"]
    command += ["gconfig.max_new_tokens=16", "evaluator.freq_steps=5", "launcher.preflight=false", "actor.kl_ctl=0.01"]
    command += ["async_training=false", "lite.deterministic=true", "launcher.trainer_threads=1", "ref={}", *overrides]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    run = folder / "core" / trial
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": (run / "weights.jsonl").read_text(),
        "metrics": [{key: row[key] for key in row if not key.startswith(("time/", "perf/"))} for row in rows],
        "rollouts": {
            path.name: sorted(map(without_server, path.read_text().splitlines()))
            for path in sorted((run / "rollouts").glob("*.jsonl"))
        },
    }


def without_server(line: str) -> str:
    row = json.loads(line)
    del row["server"]
    return json.dumps(row)


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Return the parts of two results that differ, metrics by key."""
    found = [part for part in ("weights", "rollouts") if left[part] != right[part]]
    for one, other in zip(left["metrics"], right["metrics"], strict=True):
        found += [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
    return sorted(set(found))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_migrated_script_has_the_numbers_of_the_script(tmp_path: Path, num_ranks: int) -> None:
    write_tiny_model(out=tmp_path / "model", corpus=None, seed=1)
    mode = f"allocation_mode=lite.d1p1t1+d{num_ranks}p1t1"
    script = train(tmp_path, "script", EXAMPLES / "gsm8k_grpo.py", mode)
    assert len({json.loads(line)["fingerprint"] for line in script["weights"].splitlines()}) == STEPS + 1
    beside = train(tmp_path, "beside", migrated(tmp_path), mode, "workers={}")
    assert differences(script, beside) == []
    if num_ranks == 2:  # a reference on one worker, whose parts come from two
        apart = train(tmp_path, "apart", migrated(tmp_path), mode, "workers.ref.ranks=1")
        assert differences(script, apart) == []
