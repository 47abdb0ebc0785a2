"""The live line on a real terminal (a pseudo terminal), with other output in between."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging, sys, time, warnings
logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
from arealite.api.cli_args import StatsLoggerConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.trainer.stats_logger import StatsLogger
names = {"experiment_name": "e", "trial_name": "t", "fileroot": sys.argv[2]}
stats = StatsLogger(StatsLoggerConfig(**names), FinetuneSpec(1, 4, 1))
for step in range(4):
    with stats.timer("rollout"):
        logging.info("log %d", step)
        print("print", step)
        time.sleep(0.6)
    stats.add({"reward/mean": step / 4})
    stats.commit(step)
if sys.argv[1] == "close":
    stats.close()
    logging.info("after")
else:
    raise SystemExit("crashed")
"""


def run_on_terminal(how: str, folder: Path) -> str:
    terminal, other_side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how, str(folder)],
        stdin=other_side, stdout=other_side, stderr=other_side,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(other_side)
    chunks = []
    try:
        while chunk := os.read(terminal, 65536):
            chunks.append(chunk)
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(terminal)
    process.wait(timeout=120)
    return b"".join(chunks).decode()


def screen(text: str) -> list[str]:
    """Return the lines a reader sees: a small terminal that knows what the live line uses."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif token.startswith("\x1b["):
            count = int(re.sub(r"\D", "", token) or 1)
            if token.endswith("A"):
                row = max(0, row - count)
            elif token.endswith("K"):
                lines[row] = ""
        else:
            lines[row] = lines[row].ljust(column)[:column] + token + lines[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines if line.strip()]


def test_other_output_scrolls_above_the_live_line(tmp_path: Path) -> None:
    text = run_on_terminal("close", tmp_path)
    seen = [line.split(" | ")[0] for line in screen(text) if not line.startswith("done: ")]
    assert seen == [text for step in range(4) for text in (f"log {step}", f"print {step}", f"step {step}/4")] + [
        "after"
    ]
    assert "rollout" in text and "2/4" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_crash_leaves_the_terminal_in_order(tmp_path: Path) -> None:
    text = run_on_terminal("crash", tmp_path)
    assert screen(text)[-1] == "crashed"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
