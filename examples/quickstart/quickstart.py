"""`arealite quickstart`: a tiny model from scratch, fine-tuned, then improved by asynchronous GRPO, on a CPU.

It starts the example scripts through the local launcher, as a user would: a cluster runs the same scripts. It shows
elicitation: fine-tuning teaches the model to write the steps of a word problem and to answer without them; by itself
it mostly does the latter, and reinforcement learning makes it write the steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import word_problems
from rich.console import Console
from rich.table import Table

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.launcher import local
from arealite.utils.files import write_atomically
from arealite.viewer.report import write_report

EXAMPLES = Path(__file__).parents[1] / "arealite"
SFT_STEPS = 500
"""Enough for correct written steps on all three tested seeds."""
SFT_BATCH = 24
UNCHECKED = "launcher.preflight=false"  # model and data are generated


def quickstart(overrides: Sequence[str]) -> int:
    """Run the quickstart with `overrides` (`key=value` of the GRPO config) and return the exit status."""
    began = time.monotonic()
    console = Console()
    sft_steps, argv = _split(overrides)
    config, _ = load_expr_config([*argv, "actor.path=to-be-made"], GRPOConfig)
    run = RunFolder(config)
    if run.metrics.exists():
        raise ConfigError(
            f"trial_name must be new: got {config.trial_name}, and {run.path} has results. Choose another."
        )
    from tiny_model import write_tiny_model  # slow to import; errors in arguments are reported before

    console.rule("[bold]1/3[/bold] a tiny model with random weights")
    model = write_tiny_model(out=run.path.with_name(f"{config.trial_name}-model"), corpus=None, seed=config.seed)
    console.print(f"a quarter million parameters in {model}")

    console.rule("[bold]2/3[/bold] supervised fine-tuning: it learns the steps, and mostly to skip them")
    sft_began = time.monotonic()
    sft_trial = f"{config.trial_name}-sft"
    data, num_rows = config.train_dataset.path, sft_steps * SFT_BATCH
    if is_ours := data == word_problems.PATH:
        data = f"{word_problems.CURRICULUM}?train={num_rows}&written={num_rows * 4 // 5}"
    status = local.main(
        [
            *(str(EXAMPLES / "gsm8k_sft.py"), "--config", str(EXAMPLES / "configs" / "gsm8k_sft_cpu.yaml")),
            *(f"experiment_name={config.experiment_name}", f"trial_name={sft_trial}"),
            *(f"cluster.fileroot={config.cluster.fileroot}", f"seed={config.seed}"),
            *(f"model.path={model}", f"train_dataset.path={data}", f"train_dataset.batch_size={SFT_BATCH}"),
            f"train_dataset.shuffle={'false' if is_ours else 'true'}",
            *(f"total_train_steps={sft_steps}", "evaluator.freq_steps=250", UNCHECKED),
        ],
    )
    if status != 0:
        return status
    sft_s = time.monotonic() - sft_began
    fine_tuned = RunFolder(run.path.with_name(sft_trial)).checkpoints / f"step_{sft_steps - 1}"

    console.rule("[bold]3/3[/bold] asynchronous GRPO: it discovers that writing the steps pays")
    rl_began = time.monotonic()
    status = local.main([str(EXAMPLES / "gsm8k_grpo.py"), *argv, f"actor.path={fine_tuned}"])
    if status != 0:
        return status
    now = time.monotonic()
    times_s = {"sft_s": sft_s, "rl_s": now - rl_began, "wall_s": now - began}

    summary = json.loads(run.summary.read_text(encoding="utf-8")) | {k: round(v, 1) for k, v in times_s.items()}
    write_atomically(run.summary, json.dumps(summary, indent=2) + "\n")
    _show(console, summary)
    console.print(f"summary  {run.summary}", soft_wrap=True, highlight=False)
    console.print(f"report   {write_report(run.path)}", soft_wrap=True, highlight=False)
    return 0


def _split(overrides: Sequence[str]) -> tuple[int, list[str]]:
    """Return the number of fine-tuning steps and the arguments of the GRPO script."""
    for override in overrides:
        if override.startswith("actor.path="):
            raise ConfigError(
                f"quickstart makes its own model: got {override}. Remove it, or run examples/arealite/gsm8k_grpo.py."
            )
    sft_steps = SFT_STEPS
    argv = ["--config", str(EXAMPLES / "configs" / "gsm8k_grpo_cpu.yaml"), "experiment_name=quickstart"]
    argv += [f"trial_name={time.strftime('%Y%m%d-%H%M%S')}", f"train_dataset.path={word_problems.PATH}"]
    argv += ["evaluator.freq_steps=10", UNCHECKED]
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "sft_steps":
            sft_steps = _positive(override, value)
        else:
            argv.append(f"cluster.{override}" if key == "fileroot" else override)
    return sft_steps, argv


def _positive(override: str, value: str) -> int:
    if not value.isdecimal() or int(value) == 0:
        raise ConfigError(f"sft_steps must be a positive integer: got {override}. Write e.g. sft_steps={SFT_STEPS}.")
    return int(value)


def _show(console: Console, summary: dict[str, float]) -> None:
    table = Table(title="what reinforcement learning changed", title_justify="left")
    table.add_column("held-out questions")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right", style="bold green")
    table.add_row("accuracy", f"{summary['accuracy_before']:.2f}", f"{summary['accuracy_after']:.2f}")
    tokens = (f"{summary[f'completion_tokens_{when}']:.0f}" for when in ("before", "after"))
    table.add_row("tokens per completion", *tokens)
    console.print(table)
    console.print(
        f"{summary['steps']:.0f} steps in {summary['rl_s']:.0f} s after {summary['sft_s']:.0f} s of fine-tuning; "
        f"staleness at most {summary['staleness_max']:.0f} of {summary['max_head_offpolicyness']:.0f} allowed; "
        f"{summary['generated_tokens']:,.0f} tokens generated, {summary['trained_tokens']:,.0f} trained on"
    )
