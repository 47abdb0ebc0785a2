"""What each algorithm makes of the same fine-tuned model: the word problems of the quickstart, on a CPU.

    python benchmarks/algorithms.py [--algorithms 'grpo;rloo'] [--bounds 0,2,8] [--seeds 1,2,3] [--steps 15]
        [--json] [--out benchmarks/results/algorithms.jsonl] [--plot benchmarks/results/algorithms.svg]

One model is fine-tuned per seed; then examples/arealite/gsm8k_grpo.py runs through the local launcher for each
algorithm, staleness bound and seed, with the settings of its CPU config and nothing tuned per algorithm. A bound of 0
is synchronous training. `coupled` is grpo that clips around the server's logprobs, without a correction: what
decoupling is compared with, also at four times the learning rate, where stale samples do more harm. Results are
appended as they come, and what is there already is not run again; the table and the plot are of all of them. Needs an
otherwise idle machine only for its times.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from circumstances import options, report
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from arealite.api.config.algorithm import PRESETS

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "arealite"
RESULTS = Path(__file__).parent / "results"
UNCORRECTED = ["actor.correction.action=none", "actor.correction.upper=null"]
CASES: dict[str, list[str]] = {
    **{
        name: [f"actor.algorithm={name}"]
        for name, choices in PRESETS.items()
        if choices["baseline"] not in ("critic", "teacher")
    },
    "coupled": ["actor.algorithm=grpo", "actor.proximal=rollout", *UNCORRECTED],
}
CASES["dppo"] += UNCORRECTED  # its ratio is to the sampling policy already
CASES |= {f"{name}, lr x4": [*CASES[name], "actor.optimizer.lr=8.0e-4"] for name in ("grpo", "coupled")}
EVALUATED_EVERY = 3  # steps
Run = tuple[str, int, int]
"""Case, staleness bound and seed."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--algorithms", default=";".join(CASES), help="names, separated by semicolons")
    parser.add_argument("--bounds", default="0,2,8")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--sft-steps", type=int, default=1000)
    parser.set_defaults(out=RESULTS / "algorithms.jsonl")
    parser.add_argument("--plot", type=Path, default=RESULTS / "algorithms.svg")
    arguments = parser.parse_args()
    names = arguments.algorithms.split(";")
    if unknown := sorted(set(names) - CASES.keys()):
        parser.error(f"--algorithms must be of {', '.join(CASES)}: got {', '.join(unknown)}.")
    bounds, seeds = (list(map(int, text.split(","))) for text in (arguments.bounds, arguments.seeds))
    found = read(arguments.out, steps=arguments.steps, sft_steps=arguments.sft_steps)
    wanted = [run for seed in seeds for run in itertools.product(names, bounds, [seed]) if run not in found]
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("training", total=len(wanted))
        models: dict[int, Path] = {}
        for run in wanted:
            seed = run[2]
            progress.update(task, description=f"{run[0]}, bound {run[1]}, seed {seed}")
            models[seed] = models.get(seed) or fine_tune(Path(folder), seed, arguments.sft_steps)
            result = train(Path(folder), run, models[seed], arguments.steps)
            result |= {"steps": arguments.steps, "sft_steps": arguments.sft_steps}
            found[run] = report(arguments, result, described)
            progress.advance(task)
    arguments.plot.write_text(plot_of(found), encoding="utf-8")
    if not arguments.json:
        Console(width=120).print(table_of(found))
        print(f"plot {arguments.plot}")


def described(result: dict[str, Any]) -> str:
    """Return what one run came to."""
    accuracies = f"{result['accuracy_before']:.2f} -> {result['accuracy_after']:.2f}"
    return f"{result['algorithm']}, bound {result['bound']}, seed {result['seed']}: {accuracies}"


def read(path: Path, **settings: int) -> dict[Run, dict[str, Any]]:
    """Return the results of a file that were measured with these settings; the last one of a run counts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    results = [json.loads(line) for line in lines]
    return {
        (one["algorithm"], one["bound"], one["seed"]): one
        for one in results
        if all(one[key] == value for key, value in settings.items())
    }


def launch(script: str, config: str, *overrides: str) -> None:
    command = [sys.executable, "-m", "arealite.launcher.local", str(EXAMPLES / script)]
    command += ["--config", str(EXAMPLES / "configs" / config), "launcher.preflight=false", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stdout}\n{done.stderr}")


def fine_tune(folder: Path, seed: int, steps: int) -> Path:
    """Return the folder of a model as the quickstart fine-tunes it."""
    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    from tiny_model import write_tiny_model
    from word_problems import PATH

    model = write_tiny_model(out=folder / f"tiny-{seed}", corpus=None, seed=seed)
    overrides = [f"experiment_name=sft trial_name=s{seed} cluster.fileroot={folder} seed={seed} model.path={model}"]
    overrides = [*overrides[0].split(" "), f"total_train_steps={steps}", f"train_dataset.path={PATH}"]
    launch("gsm8k_sft.py", "gsm8k_sft_cpu.yaml", *overrides)
    return folder / "sft" / f"s{seed}" / "checkpoints" / f"step_{steps - 1}"


def train(folder: Path, run: Run, model: Path, steps: int) -> dict[str, Any]:
    """Train once and return what came of it."""
    algorithm, bound, seed = run
    trial = f"{''.join(filter(str.isalnum, algorithm))}-{bound}-{seed}"
    overrides = [f"experiment_name=rl trial_name={trial} cluster.fileroot={folder} seed={seed} actor.path={model}"]
    overrides = [*overrides[0].split(" "), f"total_train_steps={steps}", f"rollout.max_head_offpolicyness={bound}"]
    overrides += [f"evaluator.freq_steps={EVALUATED_EVERY}"]
    launch("gsm8k_grpo.py", "gsm8k_grpo_cpu.yaml", *overrides, *CASES[algorithm])
    path = folder / "rl" / trial
    summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    curve = [[row["step"], row["eval/accuracy"]] for row in rows if "eval/accuracy" in row]
    shutil.rmtree(path)
    keys = ("accuracy_before", "accuracy_after", "completion_tokens_after", "trained_tokens", "staleness_max")
    return {
        "algorithm": algorithm,
        "bound": bound,
        "seed": seed,
        "curve": curve,
        **{key: summary[key] for key in keys},
        "skipped_steps": sum(row.get("optim/skipped_steps", 0.0) for row in rows),
        "seconds": round(sum(row.get("time/step_s", 0.0) for row in rows), 1),
    }


def table_of(found: dict[Run, dict[str, Any]]) -> Table:
    """Return one row per algorithm and bound: means over seeds, and the range of the accuracy."""
    table = Table(title="the same fine-tuned model after each algorithm (held-out questions, means over seeds)")
    for column in ("algorithm", "bound", "seeds", "before", "after", "lowest", "highest", "tokens", "trained", "s"):
        table.add_column(column, justify="left" if column == "algorithm" else "right")
    by_case = defaultdict(list)
    for (algorithm, bound, _), result in sorted(found.items()):
        by_case[algorithm, bound].append(result)
    for (algorithm, bound), results in by_case.items():
        means = {
            key: statistics.mean(one[key] for one in results)
            for key in ("accuracy_before", "completion_tokens_after", "trained_tokens", "seconds")
        }
        after = [one["accuracy_after"] for one in results]
        accuracies = (means["accuracy_before"], statistics.mean(after), min(after), max(after))
        table.add_row(
            *(algorithm, str(bound), str(len(results)), *(f"{value:.2f}" for value in accuracies)),
            *(f"{means['completion_tokens_after']:.1f}", f"{means['trained_tokens']:,.0f}", f"{means['seconds']:.0f}"),
        )
    return table


def plot_of(found: dict[Run, dict[str, Any]]) -> str:
    """Return an SVG: a small chart per algorithm, a line per bound, each the mean over seeds of held-out accuracy."""
    names = [name for name in CASES if any(run[0] == name for run in found)]
    bounds = sorted({run[1] for run in found})
    colours = dict(zip(bounds, itertools.cycle(("#0072b2", "#009e73", "#d55e00"))))
    width, height, columns = 210, 150, 4
    last = max((one["curve"][-1][0] for one in found.values()), default=1)
    parts = []
    for index, name in enumerate(names):
        left, top = index % columns * width + 34, index // columns * height + 46
        parts.append(f'<text x="{left}" y="{top - 8}" font-weight="bold">{name}</text>')
        for accuracy in (0.0, 0.5, 1.0):
            y = top + (1 - accuracy) * 100
            parts.append(
                f'<path d="M{left} {y} h160" stroke="#ddd"/><text x="{left - 24}" y="{y + 4}">{accuracy}</text>'
            )
        for bound in bounds:
            curves = [dict(one["curve"]) for run, one in found.items() if run[:2] == (name, bound)]
            steps = sorted(set.intersection(*map(set, curves))) if curves else []
            means = [statistics.mean(curve[step] for curve in curves) for step in steps]
            points = [
                f"{left + 160 * step / last:.1f},{top + (1 - mean) * 100:.1f}" for step, mean in zip(steps, means)
            ]
            parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colours[bound]}"/>')
    legend = "".join(f'<tspan fill="{colour}">bound {bound}  </tspan>' for bound, colour in colours.items())
    total = (columns * width, math.ceil(len(names) / columns) * height + 30)
    title = f'<text x="10" y="18">held-out accuracy over {last} steps, mean over seeds: {legend}</text>'
    font = 'font-family="sans-serif" font-size="10"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total[0]} {total[1]}" {font}>'
    return f'{head}<rect width="100%" height="100%" fill="white"/>{title}{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    main()
