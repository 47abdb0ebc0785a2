"""The rollouts of a run on disk: one JSON line per sample, appended by a thread of its own.

Invariant: lines of one file are in the order in which batches were handed out, and a write that failed raises at the
next call, so a run never continues without its record.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from arealite.rollout.account.stored_batch import columns_of
from arealite.rollout.episode import Episode
from arealite.utils.files import writing

_FLUSH_S = 120.0  # deadline for writing what is queued


class RolloutStore:
    """Appends accepted episodes to files in `<run folder>/rollouts`; with `folder` None it drops them."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="arealite-store")
        self._last: Future[None] | None = None
        self._num_batches: Counter[Path] = Counter()
        self._tokenizers: dict[int, tuple[Any, Any]] = {}

    def append(self, name: str, episodes: Sequence[Episode], trained_step: int | None) -> None:
        """Queue the samples for `<name>.jsonl` and return at once."""
        self.check()
        if self.folder is not None:
            path = self.folder / f"{name}.jsonl"
            self._last = self._thread.submit(self._write, path, list(episodes), trained_step, self._last)

    def flush(self) -> None:
        """Wait until everything is written, and raise what went wrong."""
        if self._last is None:
            return
        try:
            self._last.result(_FLUSH_S)
        except TimeoutError as error:
            raise TimeoutError(
                f"{self.folder} must take the rollouts of a batch within {_FLUSH_S:g} s: it did not. "
                "Put cluster.fileroot on a faster disk."
            ) from error

    def trim(self, version: int) -> None:
        """Remove the files of this version and later ones, which an earlier process left."""
        for path in self.folder.glob("*step_*.jsonl") if self.folder is not None else ():
            if int(path.stem.rpartition("_")[2]) >= version:
                path.unlink()

    def check(self) -> None:
        """Raise what a write that has ended raised."""
        if self._last is not None and self._last.done():
            self._last.result()

    def close(self) -> None:
        """Finish writing and raise what went wrong."""
        try:
            self.flush()
        finally:
            self._thread.shutdown(wait=self._last is None or self._last.done())

    def _write(self, path: Path, episodes: list[Episode], step: int | None, previous: Future[None] | None) -> None:
        if previous is not None:
            previous.result()
        batch = self._num_batches[path]
        self._num_batches[path] += 1
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path), path.open("a", encoding="utf-8") as file:
            for one in episodes:
                file.writelines(json.dumps(line) + "\n" for line in self._lines(one, step, batch))

    def _lines(self, one: Episode, step: int | None, batch: int) -> Iterator[dict[str, Any]]:
        tokenizer = self._tokenizer_of(one.prompt.workflow)
        tensors = dict(one.trajectory.items())
        for sample in range(one.trajectory.batch_size[0]):
            columns = columns_of({key: tensor[sample] for key, tensor in tensors.items()})
            tokens, loss_mask = columns["input_ids"], columns["loss_mask"]
            start = loss_mask.index(1) if 1 in loss_mask else len(tokens)
            yield {
                "prompt_id": str(one.prompt_id),
                "sample": sample,
                "attempt": one.attempt,
                "prompt": tokenizer and tokenizer.decode(tokens[:start]),
                "completion": tokenizer and tokenizer.decode(tokens[start:]),
                **columns,
                "server": ",".join(sorted(one.servers)),
                "trained_step": step,
                "batch": batch,
            }

    def _tokenizer_of(self, workflow: object) -> Any:
        """Return a copy of the workflow's tokenizer for this thread: a tokenizer must not serve two."""
        original = getattr(workflow, "tokenizer", None)
        if original is None:
            return None
        if id(original) not in self._tokenizers:
            self._tokenizers[id(original)] = (original, copy.deepcopy(original))  # kept, so that its id stays its own
        return self._tokenizers[id(original)][1]
