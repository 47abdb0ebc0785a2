"""Tests of the reward; run them by `python3 -m pytest`."""

import json
from pathlib import Path

from reward import score

ROWS = [json.loads(line) for line in Path(__file__).with_name("data.jsonl").read_text().splitlines()]


def test_what_a_completion_earns() -> None:
    answer = "3 + 4 = 7\n#### 7"
    assert score("3 + 4 = 7\n#### 7", answer) == score("So there are 7.", answer) == 1.0
    assert score("There are 7 or 8", answer) == score("-7", answer) == 0.1
    assert score("no idea", answer) == score("", answer) == 0.0


def test_the_answer_of_every_row_earns_all() -> None:
    assert [score(row["answer"], row["answer"]) for row in ROWS] == [1.0] * len(ROWS)
