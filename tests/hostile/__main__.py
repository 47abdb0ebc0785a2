"""Sends junk wherever the framework reads what others wrote, and looks at what becomes of it.

    PYTHONPATH=tests python -m hostile [--short] [--seed N] [--only PART ...]

Parts: requests to servers, answers to the client, files that are read, code of users, and their agents. Each runs in a
process of its own, which must end and leave nothing. Prints what it does, and at last `RESULT {json}`. Exit status: 0
when nothing is broken and nothing leaked, else 1, and then the folder with what was printed is kept and named.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness.report import conclude, print_result, say

from hostile.common import SECRET, Report, judge_text, run_part

PARTS = ("requests", "answers", "files", "code", "agents")
TIMEOUT_S = 1800.0
"""For a part; it takes a minute, and half of it if short."""
_FOUND = "FOUND "


def main() -> int:
    """Run all parts, or be one of them."""
    parser = argparse.ArgumentParser(prog="hostile", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a form of two and a half minutes on 2 cores")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where to work; default is the temporary folder")
    args = parser.parse_args()
    if args.part:
        return be_part(args.part, args.folder, args.seed, short=args.short)
    folder = Path(tempfile.mkdtemp(prefix="arealite-hostile-", dir=args.folder))
    found, seconds = Report(), dict[str, float]()
    for name in args.only:
        began = time.monotonic()
        report = run(name, folder / name, args.seed, short=args.short)
        seconds[name] = round(time.monotonic() - began, 1)
        found.add(report)
        say(f"{name}: {report.tried} inputs, {len(report.broken) + len(report.leaks)} broken, {seconds[name]:g} s")
        conclude([*report.leaks, *report.broken], folder / name)
    if not (is_broken := bool(found.leaks or found.broken)):
        shutil.rmtree(folder)
    return print_result(as_json(found) | {"seconds": seconds}, is_broken=is_broken)


def run(name: str, folder: Path, seed: int, *, short: bool) -> Report:
    """Let a process be a part, and judge its end and what it printed as well."""
    command = [sys.executable, "-m", "hostile", "--part", name]
    command += ["--seed", str(seed), "--folder", str(folder), *(["--short"] if short else [])]
    leaks, broken, console = run_part(command, folder, f"the part {name}", TIMEOUT_S)
    head, mark, found = console.rpartition(_FOUND)
    more = json.loads(found.splitlines()[0]) if mark else {"tried": 0, "errors": {}, "leaks": [], "broken": []}
    if not mark and not broken:
        broken.append(f"the part {name} must say what it found: got {console[-2000:]!r}")
    dead = {} if name == "answers" else {"dead": ()}  # the others print tracebacks of those who are to blame
    broken += judge_text(f"the console of the part {name}", head, **dead)
    return Report(more["tried"], Counter(more["errors"]), more["leaks"] + leaks, more["broken"] + broken)


def be_part(name: str, folder: Path, seed: int, *, short: bool) -> int:
    """Do what a part does, and print what it found as the last line."""
    report = Report()
    module = importlib.import_module(f"hostile.{name}")
    module.attack(report, folder, random.Random(f"{name} {seed}"), short=short)
    print(f"\n{_FOUND}{json.dumps(as_json(report))}", flush=True)
    return 0


def as_json(report: Report) -> dict[str, Any]:
    text = json.dumps(vars(report) | {"errors": dict(report.errors.most_common())})
    found: dict[str, Any] = json.loads(text.replace(SECRET, "<the secret>"))
    return found


if __name__ == "__main__":
    sys.exit(main())
