"""Scripts of ranks, the same with the three lines changed that docs/core.md names, and as graphs: equal numbers."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import testing_forks
import torch
from testing_metrics import undocumented
from testing_quickstart import WORD_PROBLEMS, write_tiny_model
from testing_rollouts import stored_rows

from arealite.core.records import read_calls
from arealite.rollout.account.rollout_file import read_columns, read_update
from arealite.server import __main__ as server
from arealite.utils.network import hold_port, port_of

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


def arguments(folder: Path, trial: str, config: str, *overrides: str) -> list[str]:
    """Return those of a script that trains a tiny model with a reward that always teaches something."""
    (folder / "score.py").write_text(SCORE)
    words = ["--config", str(EXAMPLES / "configs" / f"{config}_cpu.yaml"), f"actor.path={folder / 'model'}"]
    words += [f"cluster.fileroot={folder}", "experiment_name=core", f"trial_name={trial}"]
    words += ["train_dataset.batch_size=6", "gconfig.n_samples=4", "gconfig.max_new_tokens=8"]
    words += [f"train_dataset.path={WORD_PROBLEMS}?train=200&test=10", f"reward={folder / 'score.py'}:score"]
    return [*words, "evaluator.freq_steps=5", "async_training=false", *overrides]


def launch_command(folder: Path, trial: str, script: Path, config: str, *overrides: str) -> list[str]:
    """Return what trains with a server of its own."""
    command = [sys.executable, "-m", "arealite.launcher.local", str(script)]
    command += ["launcher.preflight=false", "launcher.trainer_threads=1", "lite.deterministic=true"]
    return [*command, *arguments(folder, trial, config, *overrides)]


def train(folder: Path, trial: str, script: Path, config: str, *overrides: str) -> dict[str, Any]:
    """Train with the launcher, and return what must not depend on the script."""
    command = launch_command(folder, trial, script, config, *overrides)
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return numbers_of(folder / "core" / trial)


def train_in_forks(
    folder: Path, trial: str, script: Path, config: str, *overrides: str, ranks: int = 1, **environment: str
) -> dict[str, Any]:
    """Train by hand, in forks that need not import torch, and return what must not depend on the script."""
    log = folder / f"{trial}.log"
    with ExitStack() as stack:

        def start(*program: Any, **environment: str) -> Any:
            process = testing_forks.start(logged, log, *program, **environment)
            stack.callback(process.join)
            stack.callback(process.kill)
            return process

        port, meeting = (str(port_of(stack.enter_context(hold_port()))) for _ in range(2))
        served = ["--model-path", str(folder / "model"), "--port", port, "--deterministic", "--weight-version", "0"]
        start(server.main, served)
        given = (f"rollout.server_addrs=[127.0.0.1:{port}]", "rollout.backend=lite")
        words = arguments(folder, trial, config, *given, *overrides)
        group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": meeting} | environment
        places = [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        processes = [start(run_script, script, words, **place) for place in places]
        statuses = [testing_forks.status_of(process, 3000.0) for process in processes]
    assert statuses == [0] * ranks, log.read_text()
    return numbers_of(folder / "core" / trial)


def logged(log: Path, program: Callable[..., Any], *arguments: Any) -> Any:
    """Run a program of a fork, whose output the test can show."""
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    return program(*arguments)


def run_script(script: Path, words: list[str]) -> None:
    torch.set_num_threads(1)
    runpy.run_path(str(script))["main"](words)


def numbers_of(run: Path) -> dict[str, Any]:
    """Return what must not depend on the script that has trained."""
    return {
        "weights": (run / "weights.jsonl").read_text(),
        "metrics": metrics_of(run),
        "rollouts": {
            path.name: sorted(map(without_server, stored_rows(path))) for path in sorted((run / "rollouts").iterdir())
        },
        "updates": {path.parent.name: updates_of(path) for path in (run / "rollouts").glob("step_*/0.parquet")},
    }


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step but for those of clocks."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert not undocumented({key for row in rows for key in row})
    of_clocks = ("time/", "perf/", "core/", "wait/", "bound/", "weights/pause_s", "weights/sent_mib")
    return [{key: row[key] for key in row if not key.startswith(of_clocks)} for row in rows]


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
    ("num_ranks", "apart"),
    [
        pytest.param(1, "workers={}", marks=pytest.mark.long),
        (2, "workers={ref: {ranks: 1}, rollout: {num: 2}}"),
    ],
)
def test_script_migrated_script_and_graph_have_equal_numbers(
    tmp_path: Path, num_ranks: int, apart: str, measured: Callable[..., None]
) -> None:
    """With two ranks the graph's reference has one worker, to whom both parts of a batch come; episodes have two."""
    write_tiny_model(out=tmp_path / "model", corpus=None, seed=1)
    keys = [f"allocation_mode=d{num_ranks}p1t1", "actor.kl_ctl=0.01", "ref={}", f"total_train_steps={STEPS}"]
    script = train_in_forks(tmp_path, "script", EXAMPLES / "gsm8k_grpo.py", "gsm8k_grpo", *keys, ranks=num_ranks)
    assert len({json.loads(line)["fingerprint"] for line in script["weights"].splitlines()}) == STEPS + 1
    beside = train_in_forks(tmp_path, "migrated", migrated(tmp_path), "gsm8k_grpo", *keys, "workers={}")
    assert differences(script, beside) == []
    graph = train_in_forks(tmp_path, "graph", TRAINING / "main_grpo.py", "gsm8k_grpo", *keys, apart)
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


@pytest.mark.long
def test_a_run_continues_as_a_graph_what_a_script_of_ranks_began_and_the_other_way_round(tmp_path: Path) -> None:
    """The critic lies beside the policy in the script, and has a worker of its own in the graph."""
    write_tiny_model(out=tmp_path / "model", corpus=None, seed=1)
    script, graph = EXAMPLES / "gsm8k_ppo.py", TRAINING / "main_sync_ppo.py"
    keys = ("allocation_mode=d1p1t1", "critic_warmup_steps=1", "evaluator.freq_steps=100")
    apart = "workers.critic.ranks=1"
    whole = train_in_forks(tmp_path, "whole", graph, "gsm8k_ppo", *keys, "total_train_steps=6", apart)
    page = (tmp_path / "core" / "whole" / "graph.html").read_text()
    assert all(name in page for name in ("critic_train", "actor_train", "advantages"))
    keys += ("recover.mode=auto", "recover.freq_steps=2")
    for num_steps, part, more in ((2, script, ()), (4, graph, (apart,)), (6, script, ())):
        steps = f"total_train_steps={num_steps}"
        parts = train_in_forks(tmp_path, "parts", part, "gsm8k_ppo", *keys, steps, *more)
    for one in (whole, parts):  # each part ends with an evaluation
        one["rollouts"] = {name: rows for name, rows in one["rollouts"].items() if not name.startswith("eval")}
    assert len(whole["rollouts"]) == 6 and differences(whole, parts) == []


@pytest.mark.long
def test_fine_tuning_by_script_and_graph_have_equal_numbers(tmp_path: Path) -> None:
    """The last model is compared, as nobody is served versions of the weights."""
    write_tiny_model(out=tmp_path / "model", corpus=None, seed=1)
    words = ["--config", str(EXAMPLES / "configs" / "gsm8k_sft_cpu.yaml"), f"model.path={tmp_path / 'model'}"]
    words += [f"cluster.fileroot={tmp_path}", "experiment_name=core", "total_train_steps=4", "evaluator.freq_steps=2"]
    words += [f"train_dataset.path={WORD_PROBLEMS}?train=200&test=10", "train_dataset.batch_size=8"]
    found, graph = [], (TRAINING / "main_sft.py", "workers={}")
    for trial, (script, *more) in {"script": (EXAMPLES / "gsm8k_sft.py",), "graph": graph}.items():
        log, run = tmp_path / f"{trial}.log", tmp_path / "core" / trial
        process = testing_forks.start(logged, log, run_script, script, [*words, f"trial_name={trial}", *more])
        assert testing_forks.status_of(process, 1500.0) == 0, log.read_text()
        (weights,) = run.glob("checkpoints/*/model.safetensors")
        found.append((weights.name, weights.read_bytes(), metrics_of(run)))
    assert found[0] == found[1]
    rows = found[0][2]
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 2, 4]
    assert rows[-1]["eval/loss"] < rows[0]["eval/loss"] - 0.5
