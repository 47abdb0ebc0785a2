"""Scripts of ranks, the same with the three lines changed that docs/core.md names, and as graphs: equal numbers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testing_metrics import undocumented
from testing_quickstart import WORD_PROBLEMS, write_tiny_model
from testing_rollouts import stored_rows

from arealite.core.records import read_calls
from arealite.rollout.account.rollout_file import read_columns, read_update

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples" / "arealite"
TRAINING = REPOSITORY / "training"
SCORE = """
def score(prompt, completions, prompt_ids, completion_ids, **row):
    return float(sum(completion_ids) % 7) / 7
"""
STEPS = 10
pytestmark = pytest.mark.slow


def migrated(folder: Path) -> Path:
    """Return the example with what docs/core.md says to change."""
    text = (EXAMPLES / "gsm8k_grpo.py").read_text()
    diff = (REPOSITORY / "docs" / "core.md").read_text().split("```diff\n")[1].split("```")[0]
    at, before, follows = 0, "", False  # a line of + stands for the - before it, else it comes before the next line
    for line in diff.splitlines(keepends=True):
        if line[0] == "+" and follows:
            text, at = text[:at] + line[1:] + text[at:], at + len(line) - 1
        elif line[0] == "+":
            before += line[1:]
        else:
            assert text.count(line[1:]) == 1, line
            at = text.index(line[1:])
            follows = line[0] == "-"
            text = text[:at] + before + text[at + (len(line) - 1) * follows :]
            at, before = at + len(before), ""
    path = folder / "gsm8k_grpo_core.py"
    path.write_text(text)
    return path


def launch_command(folder: Path, trial: str, script: Path, config: str, *overrides: str) -> list[str]:
    """Return what trains a tiny model with a reward that always teaches something."""
    (folder / "score.py").write_text(SCORE)
    command = [sys.executable, "-m", "arealite.launcher.local", str(script)]
    command += ["--config", str(EXAMPLES / "configs" / f"{config}_cpu.yaml"), f"actor.path={folder / 'model'}"]
    command += [f"cluster.fileroot={folder}", "experiment_name=core", f"trial_name={trial}"]
    command += ["train_dataset.batch_size=6", "gconfig.n_samples=4", "gconfig.max_new_tokens=16"]
    command += [f"train_dataset.path={WORD_PROBLEMS}?train=200&test=10", f"reward={folder / 'score.py'}:score"]
    command += ["evaluator.freq_steps=5", "launcher.preflight=false", "async_training=false", *overrides]
    return [*command, "lite.deterministic=true", "launcher.trainer_threads=1"]


def train(folder: Path, trial: str, script: Path, config: str, *overrides: str) -> dict[str, Any]:
    """Train, and return what must not depend on the script."""
    command = launch_command(folder, trial, script, config, *overrides)
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    run = folder / "core" / trial
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert not undocumented({key for row in rows for key in row})
    of_clocks = ("time/", "perf/", "core/", "wait/", "bound/", "weights/pause_s", "weights/sent_mib")
    return {
        "weights": (run / "weights.jsonl").read_text(),
        "metrics": [{key: row[key] for key in row if not key.startswith(of_clocks)} for row in rows],
        "rollouts": {
            path.name: sorted(map(without_server, stored_rows(path))) for path in sorted((run / "rollouts").iterdir())
        },
        "updates": {path.parent.name: updates_of(path) for path in (run / "rollouts").glob("step_*/0.parquet")},
    }


def updates_of(batch: Path) -> list[str]:
    """Return what the update computed for each row of a stored batch."""
    rows, _ = read_columns(batch, ["reward"])
    updates = read_update(batch, range(len(rows)))
    assert all(update.keys() >= {"advantages"} for update in updates)
    return [json.dumps(update, sort_keys=True) for update in updates]


def without_server(row: dict[str, Any]) -> str:
    return json.dumps(row | {"server": ""})


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Return the parts of two results that differ, metrics by key."""
    found = [part for part in ("weights", "rollouts", "updates") if left[part] != right[part]]
    for one, other in zip(left["metrics"], right["metrics"], strict=True):
        found += [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
    return sorted(set(found))


@pytest.mark.parametrize(
    ("num_ranks", "apart"), [(1, "workers={}"), (2, "workers={ref: {ranks: 1}, rollout: {num: 2}}")]
)
def test_script_migrated_script_and_graph_have_equal_numbers(
    tmp_path: Path, num_ranks: int, apart: str, measured: Callable[..., None]
) -> None:
    """With two ranks the graph's reference has one worker, to whom both parts of a batch come; episodes have two."""
    write_tiny_model(out=tmp_path / "model", corpus=None, seed=1)
    keys = [f"allocation_mode=lite.d1p1t1+d{num_ranks}p1t1", "actor.kl_ctl=0.01", "ref={}"]
    keys += [f"total_train_steps={STEPS}"]
    script = train(tmp_path, "script", EXAMPLES / "gsm8k_grpo.py", "gsm8k_grpo", *keys)
    assert len({json.loads(line)["fingerprint"] for line in script["weights"].splitlines()}) == STEPS + 1
    beside = train(tmp_path, "migrated", migrated(tmp_path), "gsm8k_grpo", *keys, "workers={}")
    assert differences(script, beside) == []
    graph = train(tmp_path, "graph", TRAINING / "main_grpo.py", "gsm8k_grpo", *keys, apart)
    assert differences(script, graph) == []
    assert all('"log_ratio": [' in row for rows in graph["updates"].values() for row in rows)
    calls = read_calls(tmp_path / "core" / "graph" / "calls.jsonl")
    steps = [one.step for one in calls if one.call == "actor_train"]
    assert steps == list(range(STEPS))
    for other in (beside, graph):
        measured(
            equal_versions=other["weights"].count("\n"),
            equal_rollouts=sum(map(len, other["rollouts"].values())),
            equal_metrics=sum(map(len, other["metrics"])),
        )


def test_a_critic_of_its_own_has_the_numbers_of_one_beside_the_policy(tmp_path: Path) -> None:
    write_tiny_model(out=tmp_path / "model", corpus=None, seed=1)
    keys = ("total_train_steps=4", "critic_warmup_steps=1")
    script = train(tmp_path, "script", EXAMPLES / "gsm8k_ppo.py", "gsm8k_ppo", *keys)
    graph = train(tmp_path, "graph", TRAINING / "main_sync_ppo.py", "gsm8k_ppo", *keys, "workers.critic.ranks=1")
    assert differences(script, graph) == []
    page = (tmp_path / "core" / "graph" / "graph.html").read_text()
    assert all(name in page for name in ("critic_train", "actor_train", "advantages"))


def test_a_run_continues_as_a_graph_what_a_script_of_ranks_began_and_the_other_way_round(tmp_path: Path) -> None:
    write_tiny_model(out=tmp_path / "model", corpus=None, seed=1)
    scripts = {"script": EXAMPLES / "gsm8k_ppo.py", "graph": TRAINING / "main_sync_ppo.py"}
    checkpoints = ("recover.mode=auto", "recover.freq_steps=2", "evaluator.freq_steps=100")
    whole = train(tmp_path, "whole", scripts["script"], "gsm8k_ppo", "total_train_steps=6", "evaluator.freq_steps=100")
    for num_steps, kind, workers in ((2, "script", ()), (4, "graph", ("workers.critic.ranks=1",)), (6, "script", ())):
        keys = (f"total_train_steps={num_steps}", *workers, *checkpoints)
        parts = train(tmp_path, "parts", scripts[kind], "gsm8k_ppo", *keys)
    assert parts["weights"] == whole["weights"]
    assert {name: lines for name, lines in parts["rollouts"].items() if not name.startswith("eval")} == {
        name: lines for name, lines in whole["rollouts"].items() if not name.startswith("eval")
    }
