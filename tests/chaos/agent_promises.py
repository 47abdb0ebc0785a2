"""What a run of agents promises beyond any other: trained ids are the sampled ones, and each failure has its kind.

Invariant: what was sampled is what the servers returned, not what the proxy made of it; what must fail follows from the
agents' plans, not from the run's own words.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from testing_row_audit import audit_turns

from arealite.api.io_struct import ModelResponse
from arealite.rollout.account.rollout_file import read_rows
from arealite.utils.files import read_jsonl
from chaos.agents import KINDS, PLANS, Act, plan_of, rejects
from chaos.experiment import Experiment

_OF_SERVERS = {"server_error", "server_unreachable", "timeout"}
"""Kinds that an attempt may fail with whatever its agents do."""


def judge_agents(experiment: Experiment, counts: Counter[str]) -> Iterator[str]:
    """Yield the promises that are broken, and count turns, interruptions and failures."""
    yield from _turns(experiment, counts)
    yield from _failures(experiment, counts)


def _turns(experiment: Experiment, counts: Counter[str]) -> Iterator[str]:
    """Each row is what servers returned, and has all that a client has read."""
    rows = defaultdict(list)
    for step in range(experiment.steps):
        for row in read_rows(experiment.run_folder / "rollouts" / f"step_{step}"):
            rows[row["prompt_id"], row["attempt"], str(row["sample"])].append(row)
    asked = {}  # of an attempt that was made again after a restart, the last: the earlier one was not trained
    for line in read_jsonl(experiment.folder / "runs" / "asked.jsonl"):
        asked |= {(line["prompt_id"], line["attempt"], sample): run for sample, run in line["runs"].items()}
    for name, of_run in sorted(rows.items()):
        run = asked[name]
        responses = [_response(one) for one in run["responses"]]
        audit = audit_turns(of_run, responses)
        counts.update(run["counts"])
        counts.update(turns=audit.num_turns, turns_equal=audit.num_equal, runs_of_several_rows=len(of_run) > 1)
        counts["interrupted"] += sum(one["num_interrupts"] > 0 for one in run["responses"])
        counts["mixed_versions"] += sum(len(set(one.output_versions)) > 1 for one in responses)
        yield from (f"run {name} must train on what was sampled: {problem}" for problem in audit.problems)
        if lost := set(run["read"]) - set(run["turns"]):
            yield f"run {name} must have every turn that a client has read: it lacks {sorted(lost)}"
    # Whether an update meets a turn in flight is the machine's choice, so interruptions are counted and not asked for.
    for what in ("retries", "orphans", "runs_of_several_rows"):
        if not counts[what]:
            yield f"some turns must be {what}: got none"


def _response(written: dict[str, Any]) -> ModelResponse:
    names = ("input_tokens", "output_tokens", "output_logprobs", "output_versions", "stop_reason")
    return ModelResponse(*(written[name] for name in names), server="")


def _failures(experiment: Experiment, counts: Counter[str]) -> Iterator[str]:
    """Each attempt that must fail has failed with its kind, and no other one, but for what servers did."""
    met: set[tuple[Act, Act]] = set()
    with contextlib.closing(sqlite3.connect(experiment.run_folder / "ledger.sqlite")) as ledger:
        retries = defaultdict(list)
        for ticket, kind in ledger.execute("SELECT ticket, kind FROM retries ORDER BY position"):
            retries[ticket].append(kind)
        prompts = list(ledger.execute("SELECT ticket, idx, state, reason FROM prompts WHERE epoch >= 0"))
    for ticket, index, state, reason in prompts:
        if state not in ("trained", "accepted", "failed", "rejected"):
            continue
        plan, kinds = plan_of(index), [*retries[ticket], *([reason] if state == "failed" else [])]
        met.add(plan)
        counts.update(f"failed_{kind}" for kind in kinds)
        expected = [KINDS.get(act) for act in plan]
        for kind, own in zip(kinds, expected, strict=True) if state == "failed" else zip(kinds, expected):
            if kind != own and kind not in _OF_SERVERS:
                yield f"an attempt of prompt {index}, {_named(plan)}, must fail with {own}: got {kind}"
        if state != "failed" and expected[len(kinds)] is not None:
            yield f"prompt {index}, {_named(plan)}, must fail with {expected[len(kinds)]}: got {state} after {kinds}"
        if (state == "rejected") != (plan[0] is rejects) and state != "failed":
            yield f"prompt {index}, {_named(plan)}, must be rejected if its agent says so: got {state}"
    if left := set(PLANS) - met:
        yield f"agents must meet all plans: got none of {sorted(map(_named, left))}"


def _named(plan: tuple[Act, Act]) -> str:
    return " then ".join(act.__name__ for act in plan)
