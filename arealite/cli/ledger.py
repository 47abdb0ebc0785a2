"""`arealite ledger`: the audit of a run folder, as tables or as one JSON object."""

import argparse
import dataclasses
import json

from rich import box
from rich.console import Console
from rich.table import Column, Table

from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.rollout.account.audit import Audit, Bias, audit

_MAX_NAMES = 10
_STATES = ("trained", "rejected", "failed", "accepted", "running", "issued", "retried")  # in the order of the table
_TITLES = {
    "latency_s": ("latency", "seconds", "slowest", "fastest"),
    "tokens": ("length", "mean tokens", "longest", "shortest"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare the dataloader's cursor, the stored rollouts and the ledger of a run, also while it runs. "
        "Exit status 1: a prompt is lost, repeated or in no state."
    )
    parser.add_argument("run_folder", help="<fileroot>/<experiment>/<trial>")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the state of every prompt of a run and return 0, or 1 when one is lost, repeated or in no state."""
    run = RunFolder(args.run_folder)
    if run.metrics.exists() and not run.ledger.exists():
        raise ConfigError(
            f"a ledger belongs to a run that samples: got {args.run_folder}, whose run kept none (fine-tuning)."
        )
    result = audit(args.run_folder)
    if args.json:
        print(json.dumps({**dataclasses.asdict(result), "adds_up": result.adds_up}))
    else:
        console = Console(highlight=False)
        console.print(_totals(result))
        for bias in result.bias:
            if bias.parts:
                console.print(_deciles(bias))
                console.print(_comparison(bias) + "\n")
        console.print("\n".join(_verdict(result)), soft_wrap=True)
    return 0 if result.is_clean else 1


def _totals(result: Audit) -> Table:
    columns = [Column(name, justify="right") for name in ("prompts", "share", "samples", "tokens")]
    table = _table("Prompts by state", Column("state", no_wrap=True), *columns)
    for state in sorted(result.states, key=_order):
        count, of_state = result.states[state], result.samples.get(state, {})
        numbers = [_percent(count / result.issued), *(f"{of_state.get(name, 0):,}" for name in ("samples", "tokens"))]
        named = state.replace("_", ": ", 1)  # failed: reward_timeout
        table.add_row(named, f"{count:,}", *([] if state.startswith("retried_") else numbers))
    return table


def _deciles(bias: Bias) -> Table:
    title, unit, *_ = _TITLES[bias.measure]
    columns = [Column(name, justify="right", no_wrap=True) for name in (unit, "settled", "trained")]
    table = _table(f"Bias by {title}", *columns, Column("dropped, % by reason"))
    for part in bias.parts:
        shares = part.dropped_shares.items()
        dropped = ", ".join(f"{outcome.partition('_')[2]} {100 * share:.1f}" for outcome, share in shares)
        table.add_row(f"{part.low:.4g} .. {part.high:.4g}", f"{part.settled:,}", _percent(part.trained_share), dropped)
    if bias.unmeasured:
        table.add_row("unknown", f"{bias.unmeasured:,}")
    return table


def _comparison(bias: Bias) -> str:
    *_, high, low = _TITLES[bias.measure]
    if bias.difference is None or bias.standard_error is None:
        return "One prompt shows no bias."
    difference, error = 100 * bias.difference, 100 * bias.standard_error
    judgement = "within" if abs(difference) <= 2 * error else "beyond"
    return (
        f"Trained share of the {high} minus the {low}: {difference:+.1f} ± {error:.1f} points, "
        f"{judgement} two standard errors."
    )


def _verdict(result: Audit) -> list[str]:
    checkpoint = "no checkpoint" if result.checkpoint_step is None else f"checkpoint of step {result.checkpoint_step}"
    return [
        f"issued {result.issued:,} = trained {result.trained:,} + rejected {result.rejected:,} + failed "
        f"{result.failed:,} + pending {result.pending:,}{'' if result.adds_up else ': DOES NOT ADD UP'}",
        f"provisional {result.provisional:,} of the trained ({checkpoint})",
        f"lost {'unknown' if result.lost is None else _named(result.lost, result.lost_ids)}",
        f"repeated {_named(result.repeated, result.repeated_ids)}",
        *result.notes,
    ]


def _named(count: int, names: list[str]) -> str:
    rest = ", ..." if count > _MAX_NAMES else ""
    return f"{count:,}" + (f": {', '.join(names[:_MAX_NAMES])}{rest}" if names else "")


def _order(outcome: str) -> tuple[int, str]:
    state = outcome.partition("_")[0]
    return _STATES.index(state) if state in _STATES else len(_STATES), outcome


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _table(title: str, *columns: Column) -> Table:
    return Table(*columns, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
