"""Audits a run: lost and repeated prompts, and bias towards quick or short ones.

The dataloader's cursor says which prompts the run had to train, `rollouts/step_<N>` which ones it trained. A prompt is
*lost* if it lies before the cursor, is in no such file, and the ledger does not list it as rejected, failed or pending
(`trained` explains nothing). It is *repeated* if it is in the files of two steps, or one of its rows is twice in one.
During a run the newest batch can count as lost until its rollouts are written.
"""

import itertools
import json
import math
import os
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from arealite.api.run_folder import RunFolder, numbered
from arealite.rollout.account.ledger import OUTCOME, count_states, open_for_reading
from arealite.rollout.account.rollout_file import read_rows
from arealite.utils.data_order import passed_prompts
from arealite.utils.files import reading, require_object

_OPEN = ("issued", "running", "accepted")
Measure = Literal["latency_s", "tokens"]
_Id = tuple[int, int]  # epoch and index of a prompt


@dataclass(frozen=True)
class EndedPrompt:
    """A prompt that was trained, rejected or failed."""

    outcome: str  # `trained`, `rejected_<reason>` or `failed_<kind>`
    latency_s: float | None
    tokens: float | None  # mean over the group


@dataclass(frozen=True)
class Part:
    """A tenth of the ended prompts."""

    low: float  # smallest value of the measure
    high: float  # largest value of the measure
    settled: int
    trained_share: float
    dropped_shares: dict[str, float]  # by outcome


@dataclass(frozen=True)
class Bias:
    """Dependence of outcomes on one measure."""

    measure: Measure
    unmeasured: int  # prompts without a value, which are in no part
    parts: list[Part]  # ascending; fewer than ten if there are fewer prompts
    difference: float | None  # trained share of the highest part minus that of the lowest; None with fewer than two
    standard_error: float | None


@dataclass(frozen=True)
class Audit:
    """Outcomes of the prompts of a run."""

    issued: int  # tickets; the other counts come from the rows
    trained: int
    provisional: int  # trained, but in no published checkpoint: a resume would issue them again
    rejected: int
    failed: int
    pending: int
    lost: int | None  # None without a cursor to compare with
    repeated: int
    states: dict[str, int]  # prompts by state, or `rejected_<reason>`, `failed_<kind>`; `retried_<kind>`: attempts
    samples: dict[str, dict[str, int]]  # `samples`, `tokens` and `interrupts` by the state of their prompt
    checkpoint_step: int | None
    cursor: dict[str, Any] | None
    lost_ids: list[str]
    repeated_ids: list[str]
    notes: list[str] = field(default_factory=list)  # explanations of numbers
    bias: list[Bias] = field(default_factory=list)

    @property
    def adds_up(self) -> bool:
        """Whether every issued prompt is in exactly one state."""
        return self.issued == self.trained + self.rejected + self.failed + self.pending

    @property
    def is_clean(self) -> bool:
        return self.adds_up and not self.lost and not self.repeated


def audit(run_folder: str | os.PathLike[str]) -> Audit:
    """Compare cursor, rollouts and ledger of a run."""
    run = RunFolder(run_folder)
    with reading(run.ledger):
        with open_for_reading(run.ledger) as database:
            last = "SELECT (SELECT coalesce(max(ticket), 0) FROM prompts), (SELECT max(step) FROM checkpoints)"
            issued, checkpoint_step = database.execute(last).fetchone()
            later = "SELECT count(*) FROM prompts WHERE trained_version > coalesce(?, -1)"
            (provisional,) = database.execute(later, (checkpoint_step,)).fetchone()
            cursors = database.execute("SELECT state FROM cursors ORDER BY position DESC LIMIT 1").fetchall()
            explained = database.execute("SELECT epoch, idx FROM prompts WHERE state <> 'trained'").fetchall()
            sums = f"SELECT {OUTCOME}, count(*), sum(tokens), sum(num_interrupts) FROM samples"
            rows = database.execute(f"{sums} JOIN prompts USING (ticket) GROUP BY 1 ORDER BY 1")
            samples = {name: dict(zip(("samples", "tokens", "interrupts"), counts)) for name, *counts in rows}
            counts, ended = count_states(database), _ended(database)
        cursor = require_object(json.loads(cursors[0][0])) if cursors else None
        shown, repeated = _read_trained(run.rollouts)
        lost, notes = _lost(cursor, shown.union(explained))
        if lost and provisional:
            notes = ["Lost prompts that are trained provisionally come back when the run is resumed."]
        return Audit(
            issued=issued,
            trained=counts["trained"],
            provisional=provisional,
            rejected=sum(count for name, count in counts.items() if name.startswith("rejected_")),
            failed=sum(count for name, count in counts.items() if name.startswith("failed_")),
            pending=sum(counts[state] for state in _OPEN),
            lost=None if lost is None else len(lost),
            repeated=len(repeated),
            states=dict(sorted(counts.items())),
            samples=samples,
            checkpoint_step=checkpoint_step,
            cursor=cursor,
            lost_ids=[f"{epoch}-{index}" for epoch, index in sorted(lost or ())],
            repeated_ids=[f"{epoch}-{index}" for epoch, index in sorted(repeated)],
            notes=notes,
            bias=[bias_of(ended, by="latency_s"), bias_of(ended, by="tokens")],
        )


def _read_trained(folder: Path) -> tuple[set[_Id], set[_Id]]:
    """Return the prompts that the rollouts of a run contain, and those that they contain twice."""
    step_of: dict[str, int] = {}
    repeated = set()
    for step, path in numbered(folder, "step_").items():
        in_step = set()
        for line in read_rows(path, ("prompt_id", "row")):  # the rest is large and not read
            name, row = line["prompt_id"], line["row"]
            if step_of.setdefault(name, step) != step or (name, row) in in_step:
                repeated.add(name)
            in_step.add((name, row))
    return set(map(_parsed, step_of)), set(map(_parsed, repeated))


def _parsed(name: str) -> _Id:
    epoch, index = name.rsplit("-", 1)
    return int(epoch), int(index)


def _lost(cursor: Mapping[str, Any] | None, explained: set[_Id]) -> tuple[set[_Id] | None, list[str]]:
    """Return the prompts before the cursor that nothing explains; None and a note if the cursor is unknown."""
    if cursor is None:
        return None, ["lost is unknown: the ledger holds no cursor of a dataloader (one without state_dict has none)."]
    try:
        return set(passed_prompts(cursor)) - explained, []
    except KeyError as error:
        return None, [f"lost is unknown: the dataloader's cursor has no {error}, so the prompts before it are unknown."]


def _ended(database: sqlite3.Connection) -> list[EndedPrompt]:
    rows = database.execute(
        f"SELECT {OUTCOME}, prompts.latency_s, avg(tokens) FROM prompts LEFT JOIN samples USING (ticket) "
        "WHERE state NOT IN ('issued', 'running', 'accepted') GROUP BY ticket ORDER BY ticket"
    )
    return [EndedPrompt(*row) for row in rows]


def bias_of(ended: Sequence[EndedPrompt], *, by: Measure, num_parts: int = 10) -> Bias:
    """Compare the trained share of the slowest (longest) tenth of the prompts with that of the fastest (shortest).

    Standard error of p_high - p_low, with the pooled share p: sqrt(p (1 - p) (1 / n_high + 1 / n_low)). A difference
    within two standard errors is consistent with chance.
    """
    measured = [(value, one) for one in ended if (value := getattr(one, by)) is not None]
    measured.sort(key=lambda pair: pair[0])
    num_parts = min(num_parts, len(measured))
    cuts = [len(measured) * part // num_parts for part in range(num_parts + 1)] if measured else []
    parts = [_part(measured[start:end]) for start, end in itertools.pairwise(cuts)]
    difference = error = None
    if len(parts) > 1:
        low, high = parts[0], parts[-1]
        difference, count = high.trained_share - low.trained_share, low.settled + high.settled
        share = (low.trained_share * low.settled + high.trained_share * high.settled) / count
        error = math.sqrt(share * (1 - share) * (1 / low.settled + 1 / high.settled))
    return Bias(by, len(ended) - len(measured), parts, difference, error)


def _part(measured: Sequence[tuple[float, EndedPrompt]]) -> Part:
    count = len(measured)
    outcomes = Counter(one.outcome for _, one in measured)
    trained = outcomes.pop("trained", 0)
    dropped = {outcome: number / count for outcome, number in outcomes.most_common()}
    return Part(measured[0][0], measured[-1][0], count, trained / count, dropped)
