"""`arealite report`: report.html of a run."""

import argparse

from arealite.viewer.report import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", help="<fileroot>/<experiment>/<trial>")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    print(write_report(args.run_folder))
    return 0
