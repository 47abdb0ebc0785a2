"""What all benchmarks share: options, and how a result is printed and kept, with when and where it was measured."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Result = dict[str, Any]


def options(text: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's arguments, with those that all of them have."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text, a line for each result")
    parser.add_argument("--out", type=Path, help="append the results to this jsonl file")
    return parser


def listed(result: Result) -> str:
    """Return a result as a line of names and values."""
    values = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in result.items()}
    return "  ".join(f"{name} {value}" for name, value in values.items())


def report(args: argparse.Namespace, result: Result, text_of: Callable[[Result], str] = listed) -> Result:
    """Print a result as the arguments say, append it to their file, and return it with its circumstances."""
    whole = result | circumstances()
    line = json.dumps(whole)
    print(line if args.json else text_of(whole), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a", encoding="utf-8") as file:
            print(line, file=file)
    return whole


def circumstances() -> dict[str, str | int | float]:
    """Say where and when this was measured."""
    commit = ""
    with contextlib.suppress(OSError):  # a machine that only measures may have no git
        command = ["git", "rev-parse", "--short", "HEAD"]
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        commit = found.stdout.strip()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": platform.machine(),
        "cores": os.cpu_count() or 0,
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
    }
