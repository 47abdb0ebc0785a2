"""Where prompts come from: any iterable of lists of rows, without end, each row with its name.

Invariant: every row that leaves has a `prompt_id`, and no two rows of one source share one. A dataloader that names
its rows itself, and fetches them by that name, can be gone on with by another process; any other one can't.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from arealite.api.io_struct import PromptId

Row = dict[str, Any]


class PromptSource:
    """Pulls batches of rows from a dataloader and begins again when it ends."""

    def __init__(self, dataloader: Iterable[list[Row]]) -> None:
        self.dataloader = dataloader
        self._batches = self._cycle()

    def pull(self) -> list[Row]:
        """Return the next batch of rows."""
        return next(self._batches)

    def cursor(self) -> Mapping[str, Any] | None:
        """Return the dataloader's own note of what it has yielded; None if it keeps none."""
        state_dict = getattr(self.dataloader, "state_dict", None)
        return None if state_dict is None else state_dict()

    def fetch(self, prompt_id: PromptId) -> Row:
        """Return the row of a prompt that was pulled before a recovery."""
        return self.require_fetch()(prompt_id)

    def require_fetch(self) -> Callable[[PromptId], Row]:
        """Return how the dataloader fetches a row; refuse one whose rows another process could not find again."""
        fetch: Callable[[PromptId], Row] | None = getattr(self.dataloader, "fetch", None)
        if fetch is None:
            raise ValueError(
                "the dataloader of a run that goes on from checkpoints must name its rows and `fetch(prompt_id)` them: "
                f"got {type(self.dataloader).__name__}. Use PromptLoader, or set recover.mode=disabled."
            )
        return fetch

    def _cycle(self) -> Iterator[list[Row]]:
        epoch = 0
        while True:
            index = 0
            for rows in self.dataloader:
                yield [named(row, PromptId(epoch, index + offset)) for offset, row in enumerate(rows)]
                index += len(rows)
            if index == 0:
                raise ValueError(
                    "the dataloader must yield rows: got none in a whole pass. Check that it is not an exhausted "
                    "iterator and that batch_size fits the data set."
                )
            epoch += 1


def named(row: Row, prompt_id: PromptId) -> Row:
    """Return the row with a `prompt_id`: its own, or the given one."""
    return row if "prompt_id" in row else {**row, "prompt_id": prompt_id}
