"""What every run promises, whatever is done to it; looked up in its folder, the process table and its temporary folder.

Invariant: nothing here trusts the run's own counts. Staleness is recomputed from the versions of the tokens, steps are
counted in the files, and leftovers are found by the marker that the whole run inherits.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import processes
from harness.processes import environment, leftovers, marked

from arealite.rollout.account.rollout_file import read_rows
from arealite.trainer.checkpoint import checkpoints, find_damage
from arealite.utils.processes import wait_gone
from chaos.experiment import Experiment
from chaos.kills import Outcome
from chaos.victims import orphaned_ports

_TEMPORARY = (".unfinished", ".partial", ".tmp", ".old", ".removed", "-wal", "-shm", "-journal")
"""How the names of files end that nobody may find in the folder of a run that has ended."""


@dataclass
class Verdict:
    """What was found; a run without `broken` promises is fine."""

    broken: list[str] = field(default_factory=list)
    lost: int = 0
    repeated: int = 0
    staleness_max: int = -1
    version_max: int = -1
    """Newest version of a trained token."""
    num_interrupts: int = 0
    states: dict[str, int] = field(default_factory=dict)


Look = Callable[[Experiment, Verdict], Iterator[str]]


def judge(experiment: Experiment, outcome: Outcome) -> Verdict:
    """Hold a run to everything it promises; what it has left behind is ended afterwards."""
    verdict = Verdict()
    if not outcome.is_done:
        verdict.broken.append(f"it must reach its last step: it ended with {outcome.causes[-1:] or 'no word'}")
    if len(outcome.causes) > outcome.num_fatal:
        verdict.broken.append(
            f"only faults may end it: {outcome.num_fatal} did, and it ended {len(outcome.causes)} times: "
            + "; ".join(outcome.causes)
        )
    verdict.broken += _leftovers(experiment, outcome.ports)
    for look in (_files, steps, tokens, account):
        verdict.broken += complaints(look, experiment, verdict)
    return verdict


def complaints(look: Look, experiment: Experiment, verdict: Verdict) -> list[str]:
    """Return the broken promises of one kind, or that a file can't be read."""
    try:
        return list(look(experiment, verdict))
    except (OSError, ValueError, KeyError) as error:
        return [f"its files must be readable: {type(error).__name__}: {error}"]


def _leftovers(experiment: Experiment, ports: set[int]) -> Iterator[str]:
    """No process, no port, no temporary file."""
    wait_gone(marked(experiment.folder), processes.LEFT_S)
    if ports := orphaned_ports(ports, experiment.folder):
        yield f"no port may be left: got {sorted(ports)}"
    yield from leftovers(experiment.folder, experiment.temporary)


def _files(experiment: Experiment, _: Verdict) -> Iterator[str]:
    """The run folder is complete, and nothing in it is half done."""
    folder = experiment.run_folder
    if left := [str(path.relative_to(folder)) for path in folder.rglob("*") if path.name.endswith(_TEMPORARY)]:
        yield f"nothing half done may be left: got {left}"
    if damaged := [
        f"{path.name}: {text}" for _, path in checkpoints(folder / "recover") if (text := find_damage(path))
    ]:
        yield f"checkpoints must be whole: got {damaged}"
    num_steps = json.loads((folder / "summary.json").read_text())["steps"]
    if num_steps != experiment.steps or not (folder / "report.html").exists():
        yield f"summary and report must tell {experiment.steps} steps: got {num_steps}"


def steps(experiment: Experiment, _: Verdict) -> Iterator[str]:
    """Every step is told once and has its batch; the row after the last one is that of the final evaluation."""
    told = [row["step"] for row in _rows(experiment.run_folder / "metrics.jsonl")]
    if told != list(range(experiment.steps + 1)):
        yield f"metrics.jsonl must tell steps 0..{experiment.steps} once and in order: got {told}"
    seen: dict[str, int] = {}
    for step in range(experiment.steps):
        samples = {(row["prompt_id"], row["sample"]) for row in _samples(experiment, step)}
        prompts = {prompt for prompt, _ in samples}
        if len(samples) != experiment.batch_size * experiment.group_size or len(prompts) != experiment.batch_size:
            yield f"step {step} must train whole groups: got {len(samples)} samples of {len(prompts)} prompts"
        for prompt in prompts:
            if seen.setdefault(prompt, step) != step:
                yield f"a prompt must be trained once: got {prompt} in steps {seen[prompt]} and {step}"


def tokens(experiment: Experiment, verdict: Verdict) -> Iterator[str]:
    """Every trained token has a finite logprob, and a version within the bound."""
    for step in range(experiment.steps):
        for row in _samples(experiment, step):
            name = f"sample {row['sample']} of {row['prompt_id']} in step {step}"
            trained = [at for at, is_trained in enumerate(row["loss_mask"]) if is_trained]
            versions = [row["versions"][at] for at in trained]
            verdict.staleness_max = max(verdict.staleness_max, step - min(versions))
            verdict.version_max = max(verdict.version_max, *versions)
            if not step - experiment.bound <= min(versions) <= max(versions) <= step:
                yield f"{name} must have versions in {step - experiment.bound}..{step}: got {sorted(set(versions))}"
            if not all(math.isfinite(row["logprobs"][at]) and row["logprobs"][at] <= 0 for at in trained):
                yield f"{name} must have finite logprobs"
            if not math.isfinite(row["reward"]):
                yield f"{name} must have a finite reward: got {row['reward']}"


def account(experiment: Experiment, verdict: Verdict) -> Iterator[str]:
    """Nothing is lost and nothing repeated, says the audit."""
    command = [sys.executable, "-m", "arealite.cli.main", "ledger", str(experiment.run_folder), "--json"]
    env = environment()
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    if finished.returncode not in (0, 1):
        yield f"the audit must work: got {finished.stderr}"
        return
    audit: dict[str, Any] = json.loads(finished.stdout)
    verdict.lost, verdict.repeated, verdict.states = audit["lost"] or 0, audit["repeated"], audit["states"]
    verdict.num_interrupts = sum(state.get("interrupts", 0) for state in audit["samples"].values())
    if finished.returncode == 1 or audit["lost"] != 0 or audit["repeated"] != 0 or not audit["adds_up"]:
        kept = {key: audit[key] for key in ("lost_ids", "repeated_ids", "adds_up", "issued", "states", "notes")}
        yield f"the audit must find nothing lost, repeated or missing: got {kept}"
    if audit["pending"] > experiment.max_pending:
        yield (
            f"at most {experiment.max_pending} prompts may be pending at the end, as the others were forgotten: "
            f"got {audit['pending']}"
        )
    if audit["trained"] != experiment.steps * experiment.batch_size:
        yield f"{experiment.steps * experiment.batch_size} prompts must be trained: got {audit['trained']}"


def _samples(experiment: Experiment, step: int) -> list[dict[str, Any]]:
    return list(read_rows(experiment.run_folder / "rollouts" / f"step_{step}"))


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
