"""Makes every mistake of `table.py` that needs a process, and holds what the user sees to `judge.py` and `golden.txt`.

    PYTHONPATH=tests python -m mistakes [--write] [--short] [--only WORD ...]

`--write` keeps the texts as the new golden ones. Ends with a table: mistake, exit status, lines. Exit status 1 if
something is wrong.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from testing_quickstart import make_tiny_model

from mistakes.forked import fork_check
from mistakes.judge import golden, judge, normalised, write_golden
from mistakes.table import OF_CONFIG, OF_DATA_AND_MODEL, OF_RUNS, Mistake, prepare

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 900.0


def make(mistake: Mistake, folder: Path, model: Path) -> tuple[int, str]:
    """Make a mistake as a user would, and return exit status and normalised output."""
    folder.mkdir()
    prepare(mistake, folder, model)
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_ENDPOINT": "http://127.0.0.1:9", "COLUMNS": "160"}
    env["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # there is one only while the cache is cold
    env["HF_HUB_OFFLINE"] = str(int(mistake.is_offline))
    if mistake.is_forked:
        status, shown = fork_check([*mistake.command[2:], *mistake.arguments], folder, TIMEOUT_S)
        return status, normalised(shown, folder)
    command = [sys.executable, *mistake.command, *mistake.arguments]
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False
    )
    return done.returncode, normalised(done.stdout.decode(errors="replace"), folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="mistakes", description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep what is printed as the golden text")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="mistakes whose names have one of these words")
    parser.add_argument("--short", action="store_true", help="without those in the config, as in test_mistakes.py")
    args = parser.parse_args()
    chosen = [*([] if args.short else OF_CONFIG), *OF_DATA_AND_MODEL, *OF_RUNS]
    chosen = [one for one in chosen if not args.only or any(word in one.name for word in args.only)]
    kept, texts, is_wrong = golden(), {}, False
    with tempfile.TemporaryDirectory(prefix="arealite-mistakes-") as temporary, ThreadPoolExecutor(2) as threads:
        base = Path(temporary).resolve()
        model = make_tiny_model(base / "model", layers=1)
        began = time.monotonic()
        ends = threads.map(lambda one: make(one, base / one.name.replace(" ", "-").replace("'", ""), model), chosen)
        for mistake, (status, text) in zip(chosen, ends, strict=True):
            texts[mistake.name] = text
            wrong = judge(mistake, status, text)
            if not args.write and text != kept.get(mistake.name):
                before = kept.get(mistake.name, "").splitlines()
                wrong.append("other text than the golden one")
                text = "\n".join(difflib.unified_diff(before, text.splitlines(), "golden", "now", lineterm=""))
            print(f"{mistake.name:<44} exit {status:>3} {len(texts[mistake.name].splitlines()):>3} lines  "
                  f"{'; '.join(wrong) or 'ok'}", flush=True)  # fmt: skip
            if wrong:
                is_wrong = True
                print("    " + text.replace("\n", "\n    "), flush=True)
        print(f"{len(chosen)} mistakes in {time.monotonic() - began:.0f} s")
    if args.write:
        found = golden() | texts
        write_golden(
            {one.name: found[one.name] for one in (*OF_CONFIG, *OF_DATA_AND_MODEL, *OF_RUNS) if one.name in found}
        )
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
