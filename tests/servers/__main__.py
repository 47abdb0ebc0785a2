"""Tries what we need of inference servers on the servers themselves.

    python -m servers conformance [--vllm PYTHON] [--sglang PYTHON] [--skipped-sglang REASON] [--only WORD]
    python -m servers train --server vllm|sglang --python PYTHON
    python -m servers record --server vllm|sglang --python PYTHON --out FOLDER

Start it with `tests` on PYTHONPATH. PYTHON is the interpreter of the environment in which a server is installed. The
last line is `RESULT {json}`; the exit status is 1 when a check has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from servers import conformance


def main() -> int:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(prog="servers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    conforming = commands.add_parser("conformance", help="every check on every server, as one table")
    conforming.add_argument("--vllm", help="interpreter with vLLM")
    conforming.add_argument("--sglang", help="interpreter with SGLang")
    conforming.add_argument("--without-lite", action="store_true")
    conforming.add_argument("--only", default="", help="checks whose name contains this")
    args = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    set_verbosity_error()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the servers: threads that fight for a core are many times slower
    folder = Path(tempfile.mkdtemp(prefix="arealite-servers-"))
    pythons = {} if args.without_lite else {"lite": sys.executable}
    pythons |= {name: python for name in ("vllm", "sglang") if (python := getattr(args, name))}
    result = conformance.run(folder, pythons, only=args.only)
    num_failed = sum(one["failed"] for one in result["servers"].values())
    if num_failed == 0:
        shutil.rmtree(folder)
    else:
        print(f"see {folder}")
    print(f"RESULT {json.dumps(result)}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
