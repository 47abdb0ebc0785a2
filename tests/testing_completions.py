"""Completions in the style of chat models that are asked for `\\boxed{}`, right and wrong ones, by style."""

from pathlib import Path

FOLDER = Path(__file__).parent / "reward" / "completions"


def cases() -> list[tuple[str, str, float, str]]:
    """Return style, right answer, reward and completion; in the files each has a line `=== right|wrong ANSWER`."""
    found = []
    for file in sorted(FOLDER.glob("*.txt")):
        for block in file.read_text().split("=== ")[1:]:
            head, _, completion = block.partition("\n")
            verdict, answer = head.split()
            found.append((file.stem, answer, float(verdict == "right"), completion))
    return found


CASES = cases()
