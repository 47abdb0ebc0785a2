"""`arealite quickstart`: the program in examples/quickstart."""

import argparse

from arealite.cli.examples import quickstart_module


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a tiny model, fine-tune it on word problems, then improve it by asynchronous GRPO through the same "
        "launcher, server and scripts that a cluster uses. Ends with a report page."
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="any key of the GRPO config, e.g. seed=2 gconfig.n_samples=16; "
        "fileroot= is short for cluster.fileroot=, and sft_steps= is the length of the fine-tuning",
    )


def run(args: argparse.Namespace) -> int:
    """Run the quickstart and return its exit status."""
    return int(quickstart_module("quickstart").quickstart(args.overrides))
