"""Whole runs of asynchronous GRPO through the launcher on a real server, and what their folders prove.

Nothing here trusts a run's own counts where the stored samples tell: staleness is computed from the versions of the
tokens that were trained on, and prompts are accounted for by the audit.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testing_quickstart import WORD_PROBLEMS, write_tiny_model

from arealite.rollout.account.rollout_file import read_rows
from arealite.weights.log import read_weights
from servers.programs import CONTEXT, REPOSITORY, Program

ENTRY = REPOSITORY / "examples" / "arealite" / "gsm8k_grpo.py"
CONFIG = REPOSITORY / "examples" / "arealite" / "configs" / "gsm8k_grpo_cpu.yaml"
STEPS, BOUND, BATCH, GROUP = 6, 2, 6, 4
MAX_GAP = 1e-3
"""Of a canary's logprobs, and of what was trained on in steps whose tokens are all of the newest weights."""
_RUN_S = 1800.0
"""For a run that hangs: its guard then ends everything."""


@dataclass(frozen=True)
class Run:
    """One run and what must become of it."""

    name: str
    is_tied: bool
    overrides: dict[str, Any] = field(default_factory=dict)
    sleeps_by: str = ""
    """The line of the server's log that says that it gives its memory back; empty if it never does."""
    refusal: tuple[str, ...] = ()
    """What the launcher's output must say of a run that must stop; empty is a run that must finish."""


def runs_on(program: Program, *, reloads_tied: bool) -> list[Run]:
    """Return the runs that prove a program."""
    disk, broadcast = {"rollout.weight_update": "disk"}, {"rollout.weight_update": "broadcast"}
    asleep = Run(
        "asleep",
        False,
        {"allocation_mode": f"{program.name}.d1|d1"},
        sleeps_by={"sglang": "POST /release_memory_occupation", "vllm": "POST /sleep"}[program.name],
    )
    if reloads_tied:
        return [Run("disk", False, disk), Run("broadcast, tied", True, broadcast), asleep]
    refusal = ("must have an output layer of its own", "Use a model with tie_word_embeddings=false")
    return [
        Run("disk", False, disk),
        Run("broadcast", False, broadcast),
        asleep,
        Run("tied, refused", True, broadcast, refusal=refusal),
    ]


@dataclass
class Outcome:
    """What a run has left."""

    run: Run
    folder: Path
    returncode: int
    output: str
    wall_s: float
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    num_interrupts: int = 0

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return the metrics of the steps that were trained."""
        return [row for row in _rows(self.folder / "metrics.jsonl") if "policy/mismatch_kl" in row]

    @property
    def num_updates(self) -> int:
        """Return how many versions were published and proved."""
        return len(read_weights(self.folder))


def run(program: Program, folder: Path) -> dict[str, Any]:
    """Train by every way that weights can take, and return what came of it."""
    started = time.monotonic()
    model = write_tiny_model(out=folder / "model", corpus=None, seed=1, tie=False, max_position=CONTEXT)
    about = program.about(model)
    print(json.dumps(about), flush=True)
    outcomes = _train(program, folder, reloads_tied=program.name != "vllm" or about["device"] != "cpu")
    return {
        "program": about["program"],
        "version": about["version"],
        "runs": [one.run.name for one in outcomes],
        "steps_trained": sum(len(one.steps) for one in outcomes),
        "weight_updates": sum(one.num_updates for one in outcomes),
        "interrupts": sum(one.num_interrupts for one in outcomes),
        "passed": sum(len(one.passed) for one in outcomes),
        "failed": sum(len(one.failed) for one in outcomes),
        "seconds": round(time.monotonic() - started),
    }


def _train(program: Program, folder: Path, *, reloads_tied: bool) -> list[Outcome]:
    """Carry out all runs, one after the other, and judge them."""
    models = {False: folder / "untied", True: folder / "tied"}
    for is_tied, model in models.items():
        write_tiny_model(out=model, corpus=None, seed=1, tie=is_tied, max_position=CONTEXT)
    outcomes = []
    for number, run in enumerate(runs_on(program, reloads_tied=reloads_tied)):
        outcome = _launch(run, program, models[run.is_tied], folder / str(number))
        for name, complaints in _judge(outcome):
            found = list(complaints)
            outcome.failed += [f"{name}: {text}" for text in found]
            outcome.passed += [] if found else [name]
        outcomes.append(outcome)
        print(f"{run.name}: {len(outcome.steps)} steps in {outcome.wall_s:.0f} s, {_told(outcome)}", flush=True)
        for text in outcome.failed:
            print(f"  FAILED {text}", flush=True)
    return outcomes


def _launch(run: Run, program: Program, model: Path, folder: Path) -> Outcome:
    folder.mkdir()
    overrides = {
        "allocation_mode": f"{program.name}.d1p1t1+d1p1t1",
        "actor.path": model,
        "cluster.fileroot": folder,
        "experiment_name": "servers",
        "trial_name": program.name,
        "total_train_steps": STEPS,
        "gconfig.n_samples": GROUP,
        "gconfig.max_new_tokens": 64,
        "train_dataset.path": f"{WORD_PROBLEMS}?train=200&test=10",
        "train_dataset.batch_size": BATCH,
        "evaluator.freq_steps": STEPS,
        "rollout.max_concurrent_rollouts": 2 * BATCH,
        "rollout.max_head_offpolicyness": BOUND,
        "rollout.setup_timeout": 600,
        "rollout.weight_update_timeout": 120,
        "actor.group_reward_norm": "false",
        "actor.reward_bias": -0.5,  # a random model earns nothing, and its weights would never change
        "launcher.server_python": program.python,
        "launcher.inference_server_env_vars": ",".join(f"{key}={value}" for key, value in program.env.items()),
        **{f"{program.name}.{name}": json.dumps(value) for name, value in program.flags.items()},
        **run.overrides,
    }
    command = [sys.executable, "-m", "arealite.launcher.local", str(ENTRY), "--config", str(CONFIG)]
    command += [f"{name}={value}" for name, value in overrides.items()]
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "VIRTUAL_ENV")}
    env |= {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "TMPDIR": str(folder)}
    started = time.monotonic()
    guarded = [sys.executable, "-m", "arealite.launcher.place.guard", *command]
    process = subprocess.Popen(
        guarded, env=env, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    watchdog = threading.Timer(_RUN_S, process.stdin.close)  # the guard's sign to end everything
    watchdog.start()
    output = process.stdout.read()
    returncode = process.wait()
    watchdog.cancel()
    process.stdin.close()
    wall_s = time.monotonic() - started
    return Outcome(run, folder / "servers" / program.name, returncode, output, wall_s)


def _judge(outcome: Outcome) -> Iterator[tuple[str, Iterator[str]]]:
    """Name everything that is looked at, with what is wrong about it."""
    if outcome.run.refusal:
        yield "it stops and says why", _stopped(outcome)
        return
    yield "it reaches its last step", _finished(outcome)
    yield "staleness is bounded", _tokens(outcome)
    yield "servers and trainer agree", _agreement(outcome)
    yield "prompts are accounted for", _account(outcome)
    if outcome.run.sleeps_by:
        yield "its server sleeps while it trains", _sleeps(outcome)


def _stopped(outcome: Outcome) -> Iterator[str]:
    if outcome.returncode == 0:
        yield f"the exit status must not be 0 after {len(outcome.steps)} steps"
    for text in outcome.run.refusal:
        if text not in " ".join(outcome.output.split()):
            yield f"the launcher must say {text!r}: got {outcome.output[-1500:]}"


def _finished(outcome: Outcome) -> Iterator[str]:
    if outcome.returncode != 0:
        yield f"the exit status must be 0: got {outcome.returncode} and {outcome.output[-1500:]}"
    if (steps := [row["step"] for row in outcome.steps]) != list(range(STEPS)):
        yield f"steps must be 0..{STEPS - 1}: got {steps}"


def _tokens(outcome: Outcome) -> Iterator[str]:
    """Every trained token has a version within the bound, and the newest weights do get sampled from."""
    newest = -1
    for row in outcome.steps:
        step, samples = row["step"], _samples(outcome, row["step"])
        if len(samples) != BATCH * GROUP:
            yield f"step {step} must train {BATCH * GROUP} samples: got {len(samples)}"
        for sample in samples:
            trained = [at for at, is_trained in enumerate(sample["loss_mask"]) if is_trained]
            versions = [sample["versions"][at] for at in trained]
            newest = max(newest, *versions)
            if not step - BOUND <= min(versions) <= max(versions) <= step:
                yield f"step {step} must have versions {step - BOUND}..{step}: got {sorted(set(versions))}"
            if not all(math.isfinite(sample["logprobs"][at]) and sample["logprobs"][at] <= 0 for at in trained):
                yield f"step {step} must have finite logprobs"
    if newest < STEPS - 1 - BOUND:
        yield f"version {STEPS - 1 - BOUND} or a later one must be sampled from: got {newest} at most"


def _agreement(outcome: Outcome) -> Iterator[str]:
    """Every publication is proved, and what was sampled from the newest weights has the trainer's logprobs."""
    if not outcome.steps:
        yield "some step must have been trained: none was"
    for row in outcome.steps:
        if not row.get("policy/canary_gap", math.inf) <= MAX_GAP:
            yield f"step {row['step']} must have a canary gap of at most {MAX_GAP}: got {row.get('policy/canary_gap')}"
        if row["staleness/max"] == 0 and not row["policy/mismatch_kl"] <= MAX_GAP**2:
            yield f"step {row['step']} is not stale and must have no mismatch: got {row['policy/mismatch_kl']}"
        if row.get("weights/mismatched_tensors", 0) != 0:
            yield f"step {row['step']} must have no mismatched tensors: got {row['weights/mismatched_tensors']}"


def _account(outcome: Outcome) -> Iterator[str]:
    command = [sys.executable, "-m", "arealite.cli.main", "ledger", str(outcome.folder), "--json"]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    audited = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    if audited.returncode != 0:
        yield f"the audit must be clean: got {audited.returncode}: {audited.stdout[-500:]}{audited.stderr[-500:]}"
        return
    # Left to chance, as an update may find no completion that runs; the conformance suite interrupts some for sure.
    outcome.num_interrupts = sum(state.get("interrupts", 0) for state in json.loads(audited.stdout)["samples"].values())


def _sleeps(outcome: Outcome) -> Iterator[str]:
    """Between each batch and the publication of its update; no memory is saved on a CPU."""
    lines = (outcome.folder / "logs" / "server-0.log").read_text().splitlines()
    naps = [line for line in lines if outcome.run.sleeps_by in line and " 200 " in f"{line} "]
    if len(naps) != STEPS:
        yield f"the server must sleep {STEPS} times: got {len(naps)}"


def _told(outcome: Outcome) -> str:
    gaps = [row.get("policy/canary_gap", math.inf) for row in outcome.steps]
    kls = [row["policy/mismatch_kl"] for row in outcome.steps]
    worst = f"canary gap at most {max(gaps):.1g}, mismatch at most {max(kls):.1g}, " if gaps else ""
    return f"{worst}{outcome.num_interrupts} interrupts, {len(outcome.passed)} passed, {len(outcome.failed)} failed"


def _samples(outcome: Outcome, step: int) -> list[dict[str, Any]]:
    return list(read_rows(outcome.folder / "rollouts" / f"step_{step}"))


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
