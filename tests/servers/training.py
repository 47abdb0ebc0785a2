"""Whole runs of asynchronous GRPO through the launcher on a real server, and what their folders prove.

Steps, tokens and prompts are held to the promises of every run, see `chaos.promises`.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from chaos import promises
from chaos.experiment import Experiment
from harness.report import say
from testing_quickstart import make_tiny_model, texts_for
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from arealite.utils.files import read_jsonl
from arealite.utils.processes import kill_tree
from arealite.weights.log import read_weights
from servers.programs import CONTEXT, Program

STEPS = 6
MAX_GAP = 1e-3
"""Of a canary's logprobs, and of what was trained on in steps whose tokens are all of the newest weights."""
_RUN_S = 1800.0
"""For a run that hangs."""


@dataclass(frozen=True)
class Run:
    """One run and what must become of it."""

    name: str
    model: Literal["tied", "untied", "experts"]
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
        "untied",
        {"allocation_mode": f"{program.name}.d1|d1"} | disk,
        sleeps_by={"sglang": "POST /release_memory_occupation", "vllm": "POST /sleep"}[program.name],
    )
    layouts = {"d1t2": "untied", "d1p2": "untied", "d2e2": "experts"}
    divided = [
        Run(f"broadcast, {layout}", model, broadcast | {"allocation_mode": f"{program.name}.d1+{layout}"})
        for layout, model in layouts.items()
    ]
    if reloads_tied:
        return [Run("disk", "untied", disk), Run("broadcast, tied", "tied", broadcast), asleep, *divided]
    refusal = ("must have tie_word_embeddings=false and no experts", "another backend in")
    divided[-1] = replace(divided[-1], name="experts, refused", refusal=refusal)
    return [
        Run("disk", "untied", disk),
        Run("broadcast", "untied", broadcast),
        asleep,
        *divided,
        Run("tied, refused", "tied", broadcast, refusal=refusal),
    ]


@dataclass
class Outcome:
    """What a run has left."""

    run: Run
    experiment: Experiment
    status: int | None
    """None: it did not end."""
    output: str
    wall_s: float
    verdict: promises.Verdict = field(default_factory=promises.Verdict)
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return the metrics of the steps that were trained."""
        return [row for row in read_jsonl(self.experiment.run_folder / "metrics.jsonl") if "policy/mismatch_kl" in row]


def run(program: Program, folder: Path, *, only: str, short: bool) -> dict[str, Any]:
    """Train by every way that weights can take, or by broadcast only, and return what came of it."""
    models = _write_models(folder)
    about = program.about(models["untied"])
    print(json.dumps(about), flush=True)
    outcomes = []
    runs = runs_on(program, reloads_tied=program.name != "vllm" or about["device"] != "cpu")
    runs = [one for one in runs if only in one.name and (one.name in ("broadcast", "broadcast, tied") or not short)]
    for number, one in enumerate(runs):
        outcome = _launch(one, program, models[one.model], folder / str(number))
        for name, complaints in _judge(outcome):
            texts = list(complaints)
            outcome.failed += [f"{name}: {text}" for text in texts]
            outcome.passed += [] if texts else [name]
        outcomes.append(outcome)
        say(f"{one.name}: {len(outcome.steps)} steps in {outcome.wall_s:.0f} s, {_summary(outcome)}")
        for text in outcome.failed:
            say(f"  FAILED {text}")
    return {
        "program": about["program"],
        "version": about["version"],
        "runs": [one.run.name for one in outcomes],
        "steps_trained": sum(len(one.steps) for one in outcomes),
        "weight_updates": sum(len(read_weights(one.experiment.run_folder)) for one in outcomes),
        "interrupts": sum(one.verdict.num_interrupts for one in outcomes),
        "passed": sum(len(one.passed) for one in outcomes),
        "failed": sum(len(one.failed) for one in outcomes),
        "seconds": round(sum(one.wall_s for one in outcomes)),
    }


def _write_models(folder: Path) -> dict[str, Path]:
    """Write the models of runs; two ranks can divide their layers."""
    models = {name: folder / name for name in ("tied", "untied", "experts")}
    for name in ("tied", "untied"):
        texts = texts_for(models[name], None, 1)
        make_tiny_model(models[name], texts, kv_heads=2, tie=name == "tied", max_position=CONTEXT)
    dense = AutoConfig.from_pretrained(models["untied"]).to_dict()
    del dense["model_type"], dense["architectures"]
    of_experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**dense | of_experts), dtype=torch.float32)
    model.save_pretrained(models["experts"])
    AutoTokenizer.from_pretrained(models["untied"]).save_pretrained(models["experts"])
    return models


def _launch(run: Run, program: Program, model: Path, folder: Path) -> Outcome:
    overrides = {
        "gconfig.max_new_tokens": 64,
        "evaluator.freq_steps": STEPS,
        "rollout.request_timeout": 600,
        "rollout.episode_timeout": 1200,
        "rollout.setup_timeout": 600,
        "rollout.weight_update_timeout": 120,
        "launcher.preflight": True,
        "launcher.stall_timeout": 1200,
        "launcher.server_python": program.python,
        "launcher.inference_server_env_vars": ",".join(f"{key}={value}" for key, value in program.env.items()),
        **{f"{program.name}.{name}": json.dumps(value) for name, value in program.flags.items()},
        **run.overrides,
    }
    experiment = Experiment(folder, model, f"{program.name}.d1p1t1+d1p1t1", steps=STEPS, overrides=overrides)
    started = time.monotonic()
    launcher = experiment.launch(HF_HUB_OFFLINE="1", COLUMNS="200")
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.process.wait(_RUN_S)
        status = launcher.process.poll()
    finally:
        kill_tree(launcher.process.pid)
        launcher.process.wait()
    return Outcome(run, experiment, status, launcher.text(), time.monotonic() - started)


def _judge(outcome: Outcome) -> Iterator[tuple[str, Iterable[str]]]:
    """Name everything that is looked at, with what is wrong about it."""
    if outcome.run.refusal:
        yield "it stops and says why", _stopped(outcome)
        return
    yield "it reaches its last step", _finished(outcome)
    yield "staleness is bounded", _tokens(outcome)
    yield "servers and trainer agree", _agreement(outcome)
    yield "prompts are accounted for", _promised(promises.account, outcome)
    if outcome.run.sleeps_by:
        yield "its server sleeps while it trains", _sleeps(outcome)


def _promised(look: promises.Look, outcome: Outcome) -> list[str]:
    return promises.complaints(look, outcome.experiment, outcome.verdict)


def _stopped(outcome: Outcome) -> Iterator[str]:
    if outcome.status == 0:
        yield f"the exit status must not be 0 after {len(outcome.steps)} steps"
    for text in outcome.run.refusal:
        if text not in " ".join(outcome.output.split()):
            yield f"the launcher must say {text!r}: got {outcome.output[-1500:]}"


def _finished(outcome: Outcome) -> Iterator[str]:
    if outcome.status != 0:
        yield f"the exit status must be 0: got {outcome.status} and {outcome.output[-1500:]}"
    yield from _promised(promises.steps, outcome)


def _tokens(outcome: Outcome) -> Iterator[str]:
    """Every trained token has a version within the bound, and the newest weights do get sampled from."""
    yield from _promised(promises.tokens, outcome)
    if outcome.verdict.version_max < (least := STEPS - 1 - outcome.experiment.bound):
        yield f"version {least} or a later one must be sampled from: got {outcome.verdict.version_max} at most"


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


def _sleeps(outcome: Outcome) -> Iterator[str]:
    """Between each batch and the publication of its update; no memory is saved on a CPU."""
    lines = (outcome.experiment.run_folder / "logs" / "server-0.log").read_text().splitlines()
    naps = [line for line in lines if outcome.run.sleeps_by in line and " 200 " in f"{line} "]
    if len(naps) != STEPS:
        yield f"the server must sleep {STEPS} times: got {len(naps)}"


def _summary(outcome: Outcome) -> str:
    gaps = [row.get("policy/canary_gap", math.inf) for row in outcome.steps]
    kls = [row["policy/mismatch_kl"] for row in outcome.steps]
    worst = f"canary gap at most {max(gaps):.1g}, mismatch at most {max(kls):.1g}, " if gaps else ""
    counts = f"{len(outcome.passed)} passed, {len(outcome.failed)} failed"
    return f"{worst}{outcome.verdict.num_interrupts} interrupts, {counts}"
