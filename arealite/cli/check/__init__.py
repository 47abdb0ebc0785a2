"""`arealite check`: find what would make a run fail, before it starts."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "arealite check ENTRY.py --config FILE.yaml [key=value ...]"
    parser.description = (
        "Check config, output folder, model, tokenizer, chat template, data, reward and memory of the run that the "
        "launcher would start with the same arguments. Most findings name their fix."
    )
    parser.epilog = "exit status: 0 no problem (warnings don't count), 1 problems, 2 the config can't be used"
    parser.add_argument("entry", metavar="ENTRY.py", help="script with the training loop")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the launcher would get")


def run(args: argparse.Namespace) -> int:
    """Print the findings and return the exit status."""
    from arealite.cli.check.check import check

    return check(args.entry, args.arguments)
