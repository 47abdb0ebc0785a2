"""The reward of a completion: config.yaml names the function, and each reward process imports this file."""

import re


def score(completions: str, answer: str, **others: object) -> float:
    """Return 1 if the last number is the answer's, 0.1 for another number, and 0 for none."""
    said, right = _last_number(completions), _last_number(answer)
    return 0.0 if said is None else 1.0 if said == right else 0.1


def _last_number(text: str) -> int | None:
    numbers = re.findall(r"-?\d+", text)
    return int(numbers[-1]) if numbers else None
