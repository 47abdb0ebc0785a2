"""Tries what we need of inference servers on the servers themselves.

    python -m servers conformance [--vllm PYTHON] [--sglang PYTHON] [--skipped REASON] [--only WORD] [--short]
    python -m servers train --server vllm|sglang --python PYTHON [--only WORD] [--short]
    python -m servers images --server lite|vllm|sglang --python PYTHON
    python -m servers record --server vllm|sglang --python PYTHON --out FOLDER

Start it with `tests` on PYTHONPATH. PYTHON is the interpreter of the environment in which a server is installed. The
last line of the first three is `RESULT {json}`; the exit status is 1 when a check has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from servers import conformance, images, recording, training
from servers.programs import Name, program


def main() -> int:
    """Run one of the commands."""
    args = _parse()
    torch.set_num_threads(1)
    disable_progress_bar()
    set_verbosity_error()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the servers: threads that fight for a core are many times slower
    folder = Path(tempfile.mkdtemp(prefix="arealite-servers-"))
    if args.command == "record":
        print(recording.record(program(args.server, args.python), folder, args.out))
        result: dict[str, Any] = {"failed": 0}
    elif args.command == "train":
        result = training.run(program(args.server, args.python), folder, only=args.only, short=args.short)
    elif args.command == "images":
        result = images.run(program(args.server, args.python), folder)
    else:
        ours = sys.executable
        pythons: dict[Name, str] = {"lite": ours, "colocated": ours, "vllm": args.vllm, "sglang": args.sglang}
        found = {name: path for name, path in pythons.items() if path and not (args.short and name == "colocated")}
        result = conformance.run(folder, found, only=args.only, short=args.short)
        if args.skipped:
            print(f"SKIPPED {args.skipped}")
            result["skipped"] = args.skipped
    if result["failed"]:
        print(f"see {folder}")
    else:
        shutil.rmtree(folder)
    if args.command != "record":
        print(f"RESULT {json.dumps(result)}")
    return 1 if result["failed"] else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="servers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    conforming = commands.add_parser("conformance", help="every check on every server, as one table")
    conforming.add_argument("--vllm", type=os.path.abspath, help="interpreter that has vLLM")
    conforming.add_argument("--sglang", type=os.path.abspath, help="interpreter that has SGLang")
    conforming.add_argument("--skipped", help="why a server is left out, for the last line")
    conforming.add_argument("--only", default="", help="checks whose name contains this")
    trained = commands.add_parser("train", help="train through a server, by every way that weights can take")
    trained.add_argument("--only", default="", help="runs whose name contains this")
    shown = commands.add_parser("images", help="show images to a server; vLLM's environment needs torchvision for that")
    recorded = commands.add_parser("record", help="write down what a server answers, for the tests of our backends")
    for command in (trained, shown, recorded):
        kinds = ["vllm", "sglang"] + ["lite"] * (command is shown)
        command.add_argument("--server", choices=kinds, required=True)
        command.add_argument("--python", type=os.path.abspath, required=True, help="interpreter that has it")
    conforming.add_argument("--short", action="store_true", help="without in_place, and without lite in this process")
    trained.add_argument("--short", action="store_true", help="by broadcast only")
    recorded.add_argument("--out", type=Path, required=True, help="folder for <program>-<version>.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
