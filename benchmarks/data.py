"""Memory and time of a data set on every rank, until the first batch: cold, warm, and as another commit reads it.

    python benchmarks/data.py [--rows 1000000] [--type sft] [--ranks 2] [--against COMMIT --old-rows 40000]
        [--json] [--out FILE]

Rows are generated questions and answers of about 350 tokens in a file of JSON lines. All ranks start together and
share an empty cache (cold), then the full one (warm). A rank is a fresh process; seconds run from the call of
`load_datasets` to the first batch of 128 rows, memory is what it takes more than after its imports: resident, and the
part of it that no other process shares. `--against` measures one rank of another commit, in a worktree of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from circumstances import listed, options, report

REPOSITORY = Path(__file__).parents[1]
MIB = 2**20
CONFIG = """
experiment_name: benchmark
trial_name: data
model: {path: none}
actor: {path: none}
tokenizer_path: none
train_dataset: {path: PATH, type: TYPE, batch_size: 128, max_length: 4096}
valid_dataset: null
"""


def main() -> None:
    """Measure all sides in turn and print one line; with `--rank` be one of the processes."""
    parser = options(__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--type", choices=("sft", "rl"), default="sft")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--against", help="a commit to compare with")
    parser.add_argument("--old-rows", type=int, default=40_000, help="rows that it reads")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        print(json.dumps(load(args)))
        return
    result: dict[str, Any] = {name: getattr(args, name) for name in ("rows", "type", "ranks")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, args.rows, args.type)
        for side in ("cold", "warm"):
            result[side] = measure(folder, args.ranks, REPOSITORY)
        if args.against:
            tree = folder / "tree"
            git = ["git", "-C", str(REPOSITORY), "worktree"]
            subprocess.run([*git, "add", "--detach", str(tree), args.against], check=True, capture_output=True)
            try:
                write(folder, args.old_rows, args.type)
                (found,) = measure(folder, 1, tree)
            finally:
                subprocess.run([*git, "remove", "--force", str(tree)], check=True)
            result["old"] = {"commit": args.against, "rows": args.old_rows, **found}
    report(args, result, described)


def described(result: dict[str, Any]) -> str:
    """Return a line for every rank that was measured."""
    ranks = {side: result[side] for side in ("cold", "warm")} | {"old": [result["old"]] if "old" in result else []}
    return "\n".join(f"{side}  {listed(one)}" for side, found in ranks.items() for one in found)


def write(folder: Path, num_rows: int, kind: str) -> None:
    """Write the rows, and a model whose tokenizer knows their words."""
    sys.path.insert(0, str(REPOSITORY / "examples" / "quickstart"))
    from tiny_model import make_tiny_model

    draw = random.Random(1)
    words = [f"{draw.choice('bcdfglmnprst')}{draw.choice('aeiou')}{number}" for number in range(300)]
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(num_rows):
            question, answer = (" ".join(draw.choices(words, k=count)) for count in (20, 80))
            print(json.dumps({"question": f"{number} {question}", "answer": answer, "level": number}), file=file)
    (folder / "config.yaml").write_text(CONFIG.replace("PATH", str(folder / "rows.jsonl")).replace("TYPE", kind))
    if not (folder / "model").exists():
        make_tiny_model(folder / "model", [" ".join(words)], layers=1)


def measure(folder: Path, ranks: int, tree: Path) -> list[dict[str, float]]:
    """Start all ranks, with the package of a tree, and return what each found."""
    env = os.environ | {"PYTHONPATH": str(tree), "HF_DATASETS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder), "--rank"]
    started = [
        subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.PIPE, text=True) for rank in range(ranks)
    ]
    found = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a rank failed, see above")
    return [json.loads(text.splitlines()[-1]) for text in found]


def load(args: argparse.Namespace) -> dict[str, float]:
    """Load the data set as a script does and take its first batch."""
    from arealite.api.cli_args import GRPOConfig, SFTConfig, load_expr_config
    from arealite.dataset import load_datasets
    from arealite.dataset.loader import PromptLoader, sft_batches
    from arealite.utils.hf import load_hf_tokenizer

    kind = SFTConfig if args.type == "sft" else GRPOConfig
    unused = {"sft": "actor", "rl": "model"}[args.type]
    text = (args.folder / "config.yaml").read_text().replace(f"{unused}: {{path: none}}\n", "")
    (args.folder / f"{args.rank}.yaml").write_text(text)
    config, _ = load_expr_config(["--config", str(args.folder / f"{args.rank}.yaml")], kind)
    tokenizer = load_hf_tokenizer(str(args.folder / "model"))
    process = psutil.Process()
    before, began, cpu = process.memory_full_info(), time.monotonic(), time.process_time()
    rows, _ = load_datasets(config, tokenizer)
    loader = PromptLoader(rows, 128, seed=1)
    batch = next(sft_batches(loader, 0, args.rank, args.ranks) if args.type == "sft" else iter(loader))
    first_s = time.monotonic() - began
    loader.state_dict()
    after = process.memory_full_info()
    return {
        "first_batch_s": round(first_s, 2),
        "cursor_s": round(time.monotonic() - began, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
        "more_mib": round((after.rss - before.rss) / MIB, 1),
        "more_unshared_mib": round((after.uss - before.uss) / MIB, 1),
        "resident_mib": round(after.rss / MIB, 1),
        "rows_of_batch": len(batch),
    }


if __name__ == "__main__":
    main()
