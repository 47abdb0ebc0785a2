"""What must hold of the output of a mistake, and its text without what differs from run to run."""

from __future__ import annotations

import re
from pathlib import Path

from mistakes.table import Mistake

GOLDEN = Path(__file__).parent / "golden.txt"
MAX_LINES = 12
_PACKAGE = Path(__file__).parents[2]
_OURS = re.compile(r"(?:^|[ \"])\S*/arealite/(?!examples)[\w/]+\.py\b|/site-packages/\S+\.py\b")


def judge(mistake: Mistake, status: int, text: str) -> list[str]:
    """Return what is wrong with the end of a run; `text` is normalised."""
    lines = text.splitlines()
    wrong = [f"exit status {status}, not {mistake.status}"] * (status != mistake.status)
    wrong += [f"{len(lines)} lines"] * (len(lines) > MAX_LINES)
    wrong += [f"a frame of ours: {line}" for line in lines if _OURS.search(line)][:1]
    wrong += ["a traceback"] * ("Traceback (most recent" in text)
    wrong += ["a server was started"] * (mistake.status == 2 and "is ready at" in text)
    wrong += ["the user's line is missing"] * (
        mistake.has_place and not re.search(r"(train|rewards)\.py:N\b", "\n".join(lines[-5:]))
    )
    return wrong


def normalised(text: str, folder: Path) -> str:
    """Leave out folders, ports, times, process ids, line numbers and what depends on which process is faster."""
    text = text.replace(f"{folder}/", "").replace(str(folder), "FOLDER").replace(str(_PACKAGE), "REPOSITORY")
    for pattern, name in (
        (r"\x1b\[[0-9;]*m", ""),
        (r"(\.(?:py|md)):\d+", r"\1:N"),
        (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
        (r"\b\d+(\.\d+)? s\b", "N s"),
        (r"\d+\.\d (GiB|MiB)", r"N \1"),
        (r"\bpid \d+|process \d+", "PID"),
        (r"\b\d\d:\d\d:\d\d\b", "TIME"),
        (r"\b(episode|prompt) \d+-\d+", r"\1 E-I"),
        (r"(?m)^launcher \| waiting for .*\n", ""),
        (r"(?m)^.* \(\d+ alike so far\): .*\n", ""),  # how many more fail before the run ends is chance
        (r"<unknown>, line \d+", "<unknown>, line N"),
        # Ranks and servers start together: whose line comes first is chance.
        (r"(?ms)^(launcher \| [^\n]*; logs in [^\n]*\n)(.*?)^(launcher \| server-0 is ready [^\n]*\n)", r"\1\3\2"),
        (r"(?m)[ \t]+$", ""),
    ):
        text = re.sub(pattern, name, text)
    return text.strip()


def golden() -> dict[str, str]:
    """Return the kept text of every mistake."""
    parts = re.split(r"(?m)^## (.+)\n", GOLDEN.read_text() if GOLDEN.exists() else "")[1:]
    return {name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}


def write_golden(texts: dict[str, str]) -> None:
    GOLDEN.write_text("".join(f"## {name}\n{text}\n\n" for name, text in texts.items()))
