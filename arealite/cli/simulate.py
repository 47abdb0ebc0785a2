"""`arealite simulate`: how fast a run would be and what decides it, without running it: the rollout runtime in virtual
time, on simulated servers."""

import argparse
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import track

from arealite.api.cli_args import BaseExperimentConfig, GRPOConfig, InferenceEngineConfig, load_expr_config
from arealite.api.errors import ConfigError, require
from arealite.api.run_folder import RunFolder
from arealite.planner.memory import model_shape
from arealite.utils.files import write_atomically

if TYPE_CHECKING:  # it imports torch
    from arealite.planner.scenario import Scenario
    from arealite.simulate.run import Result

_PAGE = Path(__file__).parents[1] / "simulate" / "page.html"
_HEAD = "  s/step     tok/s  waits  trains  publishes  staleness  decides"
_LINE = "{step_s:8.2f}{tokens_per_s:10,.0f}{rollout:7.0%}{train:8.0%}{weights:11.0%}{staleness:7.2f} ({max_staleness})"
_LITTLE, _FULL = 0.1, 0.7  # below this wait, of a step, the trainer decides; above this use of servers, they do
HELPS = {
    "servers": "the trainer waits for servers that are full. More servers help, or fewer devices for the trainer.",
    "stragglers": "it waits for the longest completions. A larger staleness bound or concurrency helps.",
    "trainer": "more ranks help, more servers don't.",
    "publication": "weight updates wait for the network, or for servers that hang.",
}
"""What decides the speed of a run, and what helps."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Predict how fast a config would run, or variants of a run, without running it."
    parser.epilog = "docs/simulate.md says what is simulated, what is assumed, and how far off it is."
    add = add_costs(parser)
    add("source", metavar="CONFIG|RUN", help="YAML file, or the folder of a run, finished or not")
    add("--steps", metavar="N", type=int, default=20, help="to simulate after the first ones (default: 20)")
    add("--vary", metavar="key=a,b", action="append", default=[], help="values of a key; may be repeated")
    text = "mean life of servers (crash=S or hang=S), share of slow ones (slow=SHARE); may be repeated"
    add("--fail", metavar="KIND=N", action="append", default=[], help=text)
    add("--seed", metavar="N", type=int, default=1, help="of lengths and failures (default: 1)")
    add("--json", action="store_true", help="print one JSON object per line")
    add("--page", metavar="FILE", type=Path, help="write an HTML page: servers and trainer over time")
    add("overrides", metavar="key=value", nargs="*", help="keys to change")


def add_costs(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """Add what `plan` and `simulate` ask about the work and the devices, and return what adds more."""
    parser.add_argument("--gpu", metavar="NAME|FILE", help="h100, h200, a100, cpu-2-cores, or a profile of your own")
    text = "completions: mean and sigma of a lognormal, perhaps with tokens of a prompt, or those of a run's folder"
    text += " (default: 2048,0.9,256; a run that is simulated has its own)"
    parser.add_argument("--lengths", metavar="RUN|MEAN,SIGMA[,PROMPT]", default="2048,0.9", help=text)
    return parser.add_argument


def gpu_name(given: str | None, config: BaseExperimentConfig) -> str:
    """Return the profile that is meant: without one, on a cluster without GPUs, that of two cores."""
    is_cpu = config.cluster.n_gpus_per_node == 0
    require(bool(given) or is_cpu, "--gpu must be given for a cluster with GPUs: got none. Name one, e.g. --gpu h100.")
    return given or "cpu-2-cores"


def run(args: argparse.Namespace) -> int:
    """Simulate a config and its variants, print a line on each, and return 0."""
    from arealite.simulate.run import simulate

    require(args.steps > 0, f"--steps must be above 0: got {args.steps}. Correct it.")
    (asked, rows, assumed), drawn = _costs(args), {}
    variants = {name: asked(changes) for name, changes in _variants(args.vary).items()}
    logging.disable(logging.WARNING)  # what the runtime reports of servers that die
    for name, variant in track(variants.items(), "simulating", console=Console(stderr=True), transient=True):
        result = simulate(variant)
        rows.append({"run": name} | row_of(variant, result))
        drawn[name] = vars(result)
    logging.disable(logging.NOTSET)
    print("\n".join(map(json.dumps, rows) if args.json else _lines(rows, assumed)))
    if args.page:
        write_page(args.page, args.source, rows, drawn, assumed)
    return 0


def write_page(page: Path, title: str, rows: Sequence[dict[str, Any]], drawn: dict[str, Any], assumed: str) -> None:
    """Write what was simulated as an HTML page that loads nothing else."""
    data = json.dumps({"title": title, "rows": rows, "drawn": drawn, "assumed": assumed}, default=str)
    template = _PAGE.read_text(encoding="utf-8")
    write_atomically(page, template.replace("{{DATA}}", data.replace("<", "\\u003c")))


def _costs(args: argparse.Namespace) -> tuple[Callable[[Sequence[str]], "Scenario"], list[dict[str, Any]], str]:
    """Return the scenario of a config with changes, the line on the run if one was measured, and what all rests on."""
    from arealite.engine.hf_model import build_meta_model
    from arealite.planner.cost import estimated, load_gpu, scenario
    from arealite.simulate.workload import learned, measured

    folder, options = RunFolder(args.source), {"steps": args.steps, "seed": args.seed} | _failures(args.fail)
    is_run, gpu = folder.path.is_dir(), load_gpu(args.gpu) if args.gpu else None
    require(is_run or gpu is not None, "--gpu must be given for a config without a run: got none. Name one.")

    def config(*changes: str) -> GRPOConfig:
        if is_run and any(change.startswith("allocation_mode=") for change in changes):
            changes = ("rollout.num_servers=0", *changes)  # what the run's file has filled in from the allocation
        words = ["--config", str(folder.config if is_run else args.source), *changes]
        return load_expr_config(words, GRPOConfig, ignore_unknown=True)[0]

    def asked(changes: Sequence[str]) -> "Scenario":
        found, costs = config(*args.overrides, *changes), known
        mode = found.allocation_mode
        require("|" not in mode, f"allocation_mode must be servers + trainers to simulate it: got {mode}. Write '+'.")
        if gpu is not None:
            costs = estimated(found, model_shape(build_meta_model(found.actor.path, "sdpa")), gpu, known)
        return scenario(found, costs, warm_up=found.rollout.max_head_offpolicyness + 2, **options)

    known = learned(folder, config(), args.seed) if is_run else work_of(args.lengths, seed=args.seed)[0]
    if gpu is not None:
        return asked, [], f"a model on {args.gpu}, with shares of its peaks as in its profile"
    return asked, [{"run": "measured"} | measured(folder)[0]], f"what {args.source} took, on machines as busy as then"


def work_of(given: str, *, seed: int) -> "tuple[Scenario, str]":
    """Return completions of known lengths, and in words."""
    from arealite.planner.cost import lognormal
    from arealite.simulate.workload import learned

    if (run := RunFolder(given)).path.is_dir():
        config = load_expr_config(["--config", str(run.config)], GRPOConfig, ignore_unknown=True)[0]
        return learned(run, config, seed), f"lengths of {given}"
    try:
        mean, sigma, prompt = map(float, [*given.split(","), "256"][:3])
    except ValueError as error:
        problem = f"--lengths must be a run's folder or MEAN,SIGMA[,PROMPT]: got {given}. Correct it."
        raise ConfigError(problem) from error
    text = f"prompts of {prompt:,.0f} tokens, completions of {mean:,.0f} on average, lognormal with sigma {sigma:g}"
    return lognormal((prompt, mean, sigma), seed), text


def _failures(given: Sequence[str]) -> dict[str, float]:
    """Return the fields of a scenario for failures."""
    fields: dict[str, float] = {}
    for words in given:
        kind, _, number = words.partition("=")
        is_right = kind in ("crash", "hang", "slow") and number.replace(".", "", 1).isdigit()
        require(is_right, f"--fail must be crash=S, hang=S or slow=SHARE: got {words!r}. Correct it.")
        life = {"mean_life_s": float(number), "hang_share": float(kind == "hang")}
        fields |= {"slow_share": float(number)} if kind == "slow" else life
    return fields


def _variants(given: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return names and changes: none, then all combinations of values, those of the first key changing slowest."""
    choices = []
    for words in given:
        key, _, values = words.partition("=")
        require(bool(key and values), f"--vary must be key=a,b: got {words!r}. Correct it.")
        choices.append([f"{key}={value}" for value in values.split(",")])
    return {" ".join(changes) or "as is": changes for changes in ((), *itertools.product(*choices))}


def row_of(asked: "Scenario", result: "Result") -> dict[str, Any]:
    """Return the numbers of a simulated run, and what decides its speed, or its failure."""
    decides = f"{type(result.failure).__name__}: {result.failure}"
    if not result.moments:
        return {"deaths": len(result.deaths), "decides": decides}
    server, shares = asked.server, {part: spent / result.seconds for part, spent in result.spent_s.items()}
    busy, running = np.average(np.mean(result.servers, axis=1), axis=0, weights=result.step_s).tolist()
    context = server.grain * (asked.prompt + asked.max_new_tokens / 4)

    def rate(running: float) -> float:
        return running / (server.step_s + (server.sequence_s + server.context_s * context) * running)

    usual = InferenceEngineConfig(consumer_batch_size=asked.batch_size, max_head_offpolicyness=asked.bound)
    in_flight = (asked.concurrency or usual.concurrency) * asked.group / asked.num_servers
    used = busy * rate(running / busy) / rate(min(server.slots, in_flight))
    if result.failure is None and shares["rollout"] > _LITTLE:
        decides = "servers" if used > _FULL else "stragglers"
    elif result.failure is None:
        decides = "trainer" if shares["train"] > shares["weights"] else "publication"
    return {
        "step_s": result.seconds / len(result.moments),
        "tokens_per_s": result.num_trained * server.grain / result.seconds,
        **shares,
        "used": used,
        "staleness": result.mean_staleness,
        "max_staleness": max(result.staleness),
        "deaths": len(result.deaths),
        "decides": decides,
    }


def _lines(rows: Sequence[dict[str, Any]], assumed: str) -> Iterator[str]:
    """Yield a table, what its verdicts mean, and what was assumed."""
    width = max(len(row["run"]) for row in rows)
    yield " " * width + _HEAD
    for row in rows:  # a measured run has no verdict, and one that fails early nothing else
        numbers = _LINE.format(**row) if "step_s" in row else ""
        used = ", servers {used:.0%} used".format(**row) if "used" in row else ""
        yield f"{row['run']:{width}}{numbers:{len(_HEAD) - 7}}{row.get('decides', '')}{used}".rstrip()
    yield ""
    verdicts = {row.get("decides") for row in rows}
    yield from (f"{verdict}: {helps}" for verdict, helps in HELPS.items() if verdict in verdicts)
    yield f"Assumed: {assumed}."
