"""Selects stored samples: spread over training steps, and of held-out prompts before and after training."""

import itertools
import math
import re
from pathlib import Path
from typing import Any

from arealite.api.run_folder import numbered
from arealite.rollout.account.rollout_file import batch_files, read_rows

# By the rewards of the first and the last completion: 1 is right, 0 wrong.
CHANGES = {(0, 1): "learned", (1, 1): "kept", (1, 0): "lost", (0, 0): "never"}
# By the sign of the difference between other rewards.
DIFFERENCES = {1: "better", 0: "equal", -1: "worse"}
MAX_STEPS = 12
MAX_SAMPLES = 300
MAX_PAIRS_OF_A_KIND = 15
MAX_CHARACTERS = 6000
NO_TEXT = [{"given": "(no text was stored)"}]
Segments = list[dict[str, str]]
Answer = tuple[str, float, Segments]  # its name, reward and texts


def spread_steps(folder: Path) -> dict[str, int]:
    """Return folders of at most `MAX_STEPS` steps, evenly spread, with the number of rows to show of each.

    The first and the last step are among them.
    """
    steps = numbered(folder, "step_")
    shown = list(steps)
    if len(shown) > MAX_STEPS:
        shown = [shown[round(i * (len(shown) - 1) / (MAX_STEPS - 1))] for i in range(MAX_STEPS)]
    return {steps[step].name: MAX_SAMPLES // len(shown) for step in shown}


def evaluations(folder: Path, *, is_binary: bool) -> dict[str, Any] | None:
    """Return completions of an evaluation, or of the first and the last evaluation of a training.

    They are called right or wrong only if all rewards of the run are 0 or 1 (`is_binary`).
    """
    return examples(folder, is_binary=is_binary) or before_after(folder, is_binary=is_binary)


def before_after(folder: Path, *, is_binary: bool = True) -> dict[str, Any] | None:
    """Return the completions of the first and the last evaluation for the same prompts, in the data set's order."""
    steps = numbered(folder, "eval_step_")
    if len(steps) < 2:
        return None
    first, last = min(steps), max(steps)
    before, after = _first_answers(steps[first]), _first_answers(steps[last])
    is_binary &= all(line["reward"] in (0, 1) for line in (*before.values(), *after.values()))
    counts = dict.fromkeys(CHANGES.values() if is_binary else DIFFERENCES.values(), 0)
    pairs = []
    for index in sorted(before.keys() & after.keys()):
        old, new = before[index]["reward"], after[index]["reward"]
        change = CHANGES[old, new] if is_binary else DIFFERENCES[(new > old) - (new < old)]
        counts[change] += 1
        if counts[change] <= MAX_PAIRS_OF_A_KIND:
            pair = _beside(before[index]["segments"], after[index]["segments"])
            pairs.append({**pair, "rewards": [old, new], "change": change})
    shown = {"counts": counts, "num_pairs": sum(counts.values()), "pairs": pairs, "is_binary": is_binary}
    return {"first": first, "last": last} | shown


def examples(folder: Path, *, is_binary: bool = True) -> dict[str, Any] | None:
    """Return two completions per prompt of an evaluation: the greedy or the first one, and preferably one with another
    reward. `counts` has the numbers of prompts that are always, sometimes and never solved."""
    prompts: dict[tuple[float, str], tuple[str, list[Answer]]] = {}
    counts = dict.fromkeys(("always", "sometimes", "unsolved"), 0)
    if not batch_files(folder / "sampled"):
        return None
    for prompt_id, group in itertools.groupby(read_rows(folder / "sampled"), key=lambda line: line["prompt_id"]):
        last_rows = {line["sample"]: line for line in group}  # the last row of an episode has its answer
        answers = [(f"Sample {n + 1}", _reward(line), _segments(line)) for n, line in last_rows.items()]
        rewards = {reward for _, reward, _ in answers}
        is_binary &= rewards <= {0.0, 1.0}
        kind = "sometimes" if len(rewards) > 1 else "always" if rewards == {1.0} else "unsolved"
        counts[kind] += 1
        if counts[kind] <= MAX_PAIRS_OF_A_KIND:
            prompts[_place(prompt_id)] = kind, answers
    for line in read_rows(folder / "greedy"):
        if (place := _place(line["prompt_id"])) in prompts:
            prompts[place][1].insert(0, ("Greedy", _reward(line), _segments(line)))
    pairs = []
    for _, (kind, (first, *others)) in sorted(prompts.items(), key=lambda item: item[0]):
        if others:
            other = next((one for one in others if one[1] != first[1]), others[0])
            both = {"titles": [first[0], other[0]], "rewards": [first[1], other[1]]}
            pairs.append({**_beside(first[2], other[2]), **both, "change": kind})
    shown = {"heading": "Examples", "num_pairs": sum(counts.values()), "pairs": pairs, "is_binary": is_binary}
    return shown | {"counts": counts if is_binary else {}}


def _first_answers(path: Path) -> dict[tuple[float, str], dict[str, Any]]:
    """Return the last row of the first sample of each prompt by its place in the data set."""
    lines = {_place(line["prompt_id"]): line for line in read_rows(path) if line["sample"] == 0}
    return {place: {"reward": _reward(line), "segments": _segments(line)} for place, line in lines.items()}


def _place(prompt_id: str) -> tuple[float, str]:
    """Return the place of a prompt in its data set, in any epoch; other ids come last, by name."""
    match = re.fullmatch(r"-?\d{1,9}-(\d{1,15})", prompt_id, re.ASCII)
    return (int(match[1]), "") if match else (math.inf, prompt_id)


def _reward(line: dict[str, Any]) -> float:
    return math.nan if line["reward"] is None else float(line["reward"])


def _segments(line: dict[str, Any]) -> Segments:
    return cut_segments(line["segments"] or NO_TEXT)


def _beside(before: Segments, after: Segments) -> dict[str, Any]:
    """Return the first given text, and the segments that follow it in each completion."""
    (prompt, answered), (_, other) = _split(before), _split(after)
    return {"prompt": prompt, "before": answered, "after": other}


def _split(segments: Segments) -> tuple[str, Segments]:
    first, *others = segments or [{}]
    return ("", segments) if "sampled" in first else (first.get("given", ""), others)


def cut_segments(parts: Segments) -> Segments:
    """Return the segments, cut so that all turns together fit a page."""
    limit = 2 * MAX_CHARACTERS // max(2, len(parts))
    return [{kind: cut(text, limit) for kind, text in part.items()} for part in parts]


def cut(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters, with the number of characters cut."""
    text = text.strip()
    rest = len(text) - limit
    return text if rest <= 0 else f"{text[:limit]}\n... {rest} more characters"
