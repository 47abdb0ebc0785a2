"""Compare the rows that are trained on with what was sampled: ids, logprobs and versions of every turn, token by token.

It knows nothing of how rows are made. Rows may come from a batch or from `rollouts/`, responses from wherever
they were recorded as the server returned them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tensordict import TensorDict

from arealite.api.io_struct import ModelResponse

_KEYS = ("input_ids", "loss_mask", "logprobs", "versions")


@dataclass
class TurnAudit:
    """How many of the turns are trained on exactly as they were sampled, and what is wrong with the others."""

    num_turns: int = 0
    num_equal: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.problems


def audit_turns(rows: Iterable[Mapping[str, Sequence[Any]]], sampled: Sequence[ModelResponse]) -> TurnAudit:
    """Return how trained rows differ from the responses that they must come from.

    Each of `rows` has input_ids, loss_mask, logprobs and versions `[S]`, without padding. Each response must be trained
    on in exactly one row, after exactly its prompt, and no other token at all.
    """
    audit = TurnAudit(len(sampled))
    by_length: dict[int, dict[bytes, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, response in enumerate(sampled):
        ids = _ids([*response.input_tokens, *response.output_tokens])
        by_length[len(ids)][ids.tobytes()].append(number)
    wrong: dict[int, str] = {}
    times = [0] * len(sampled)
    for place, row in enumerate(rows):
        ids, mask = _ids(row["input_ids"]), np.asarray(row["loss_mask"], dtype=bool)
        explained = np.zeros_like(mask)
        for length, ends in by_length.items():
            found = ends.get(ids[:length].tobytes(), []) if length <= len(ids) else []
            turns = [one for one in found if mask[sampled[one].input_len : length].all() and sampled[one].output_len]
            if turns:  # equal responses are trained on in one row each; their logprobs tell them apart
                number = min(turns, key=lambda one: (times[one], len([*_differences(row, sampled[one])])))
                times[number] += 1
                explained[sampled[number].input_len : length] = True
                for told in _differences(row, sampled[number]):
                    wrong[number] = told
        if rest := int((mask & ~explained).sum()):
            first = int(np.argmax(mask & ~explained))
            audit.problems.append(f"row {place} trains on {rest} tokens that no response has there, from {first} on")
    for number, response in enumerate(sampled):
        if times[number] != (1 if response.output_len else 0):
            wrong[number] = f"is trained on in {times[number]} rows"
    audit.num_equal = len(sampled) - len(wrong)
    audit.problems += [f"response {number} {told}" for number, told in sorted(wrong.items())]
    return audit


def unpadded(batch: TensorDict) -> Iterator[dict[str, list[Any]]]:
    """Yield the rows of a batch `[B, S]` as lists without padding."""
    for row in range(batch.batch_size[0]):
        real = batch["attention_mask"][row].bool()
        yield {key: batch[key][row][real].tolist() for key in _KEYS}


def _ids(tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray(tokens, dtype=np.int64)


def _differences(row: Mapping[str, Sequence[Any]], response: ModelResponse) -> Iterator[str]:
    """Yield what of a response is otherwise in a row; logprobs are kept in 32 bits there."""
    place = slice(response.input_len, response.input_len + response.output_len)
    kept, returned = (np.asarray(one, np.float32) for one in (row["logprobs"][place], response.output_logprobs))
    if not np.array_equal(kept, returned):
        yield "has other logprobs in its row"
    if list(row["versions"][place]) != response.output_versions:
        yield "has other versions in its row"
