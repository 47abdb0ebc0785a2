"""The rollouts of a run on disk: a thread writes each batch, and a replay reads it back.

Invariants: a failed write raises at the next call, so a run never continues without its record; a batch is read back
bit for bit, padded with zeros to its longest row.

Numbers per token of an update are stored beside its batch as `rollouts/step_<N>/_update/<K>.parquet`: row i belongs to
row i of `<K>.parquet` and is null where that has no tokens. They keep 10 bits of mantissa, as half precision, and the
range of float32. Tools that read the folder of a step as one data set ignore names that begin with `_`.
"""

import copy
import itertools
import json
import shutil
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from tensordict import TensorDict

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder, numbered
from arealite.api.workflow_api import RolloutWorkflow
from arealite.rollout.account.rollout_file import (
    PER_TOKEN,
    batch_files,
    metadata_of,
    read_file,
    update_file,
    write_batch,
    write_table,
)
from arealite.rollout.prompts import Dataloader, Episode, Row, ShouldAccept
from arealite.rollout.trajectory import assemble_batch
from arealite.utils.files import reading, writing
from arealite.utils.packed import layout_of
from arealite.utils.tensors import concat_padded_tensors, real_entries

_FLUSH_S = 120.0  # deadline for queued writes
_NOT_STORED = "pixel_values"
_SEGMENTS = pa.list_(pa.struct([("given", pa.string()), ("sampled", pa.string())]))
_DTYPES = b"torch_dtypes"  # dtypes of the columns, in the metadata: Arrow has no bfloat16
_NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)
_LOST_BITS = 13  # of float32's mantissa: the rest compresses to about half


@dataclass(frozen=True)
class Update:
    """One rank's part: group and length per row, and numbers per token without padding."""

    groups: list[int]
    lengths: list[int]
    numbers: dict[str, np.ndarray[Any, Any]]


class RolloutStore:
    """Writes accepted episodes to `<run folder>/rollouts`; with `folder` None nothing is written.

    Training batches keep tokens and texts of a `stored_share` of their episodes, chosen by prompt.
    """

    def __init__(self, folder: Path | None, stored_share: float = 1.0) -> None:
        self.folder = folder
        self._stored_share = stored_share
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="arealite-store")
        self._last: Future[None] = Future()  # of the newest write
        self._last.set_result(None)
        self._newest: dict[bool, Path] = {}  # file, by whether it is of training
        self._trained: list[bool] | None = None  # whether each episode of the newest training batch is stored whole
        self._tokenizers: dict[int, tuple[Any, Any]] = {}
        self.write_there: Callable[[Path, list[Any], int | None], None] = write_batch  # tables that others have built

    def append(self, name: str, episodes: Sequence[Episode], trained_step: int | None) -> None:
        """Queue the samples as the next batch of `name` and return at once."""
        self.check()
        if self.folder is not None and episodes:
            path = self.folder / name
            if trained_step is not None:
                self._trained = [_is_whole(str(one.prompt_id), self._stored_share) for one in episodes]
            self._last = self._thread.submit(self._write, path, list(episodes), trained_step, self._last)

    def append_update(self, updates: Sequence[Update]) -> None:
        """Queue the update's numbers per token for the newest training batch and return at once."""
        self.check()
        if self._trained is not None:
            self._last = self._thread.submit(self._write_update, updates, self._trained, self._last)

    def flush(self) -> None:
        """Wait until everything is written; raise the error of a failed write."""
        try:
            self._last.result(_FLUSH_S)
        except TimeoutError as error:
            raise TimeoutError(
                f"{self.folder} must take the rollouts of a batch within {_FLUSH_S:g} s: it did not. "
                "Put cluster.fileroot on a faster disk."
            ) from error

    def trim(self, version: int) -> None:
        """Remove the files of this and later versions, left by an earlier process."""
        for prefix in ("step_", "eval_step_"):
            for number, path in numbered(self.folder, prefix).items() if self.folder is not None else ():
                if number >= version:
                    shutil.rmtree(path)

    def check(self) -> None:
        if self._last.done():
            self._last.result()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._thread.shutdown(wait=self._last.done())

    def _write(self, path: Path, episodes: list[Episode], step: int | None, previous: Future[None]) -> None:
        previous.result()  # a failed write fails all later ones
        newest = self._newest.get(step is not None)
        last = int(newest.stem) if newest and newest.parent == path else max(batch_files(path), default=-1)
        file = self._newest[step is not None] = path / f"{last + 1}.parquet"
        with writing(path, pa.ArrowException):
            if episodes[0].table is None:
                write_batch(file, [self._table(episodes, step)], step)
            else:
                self.write_there(file, [one.table for one in episodes], step)

    def _write_update(self, updates: Sequence[Update], is_whole: list[bool], previous: Future[None]) -> None:
        previous.result()
        batch = self._newest[True]
        with writing(batch, pa.ArrowException):
            write_update(batch, updates, is_whole)

    def _table(self, episodes: list[Episode], step: int | None) -> pa.Table:
        share = 1.0 if step is None else self._stored_share
        tokenizers = [self._tokenizer_of(one.prompt.workflow) for one in episodes]
        return table_of(episodes, [one.trajectory for one in episodes], tokenizers, share)

    def _tokenizer_of(self, workflow: object) -> Any:
        """Return a copy of the workflow's tokenizer for this thread: tokenizers are not thread-safe."""
        original = getattr(workflow, "tokenizer", None)
        if original is None:
            return None
        if id(original) not in self._tokenizers:
            self._tokenizers[id(original)] = original, copy.deepcopy(original)  # kept alive: no id is used again
        return self._tokenizers[id(original)][1]


def table_of(
    episodes: Sequence[Episode], trajectories: Sequence[TensorDict], tokenizers: Sequence[Any], stored_share: float
) -> pa.Table:
    """Return the rows of episodes as a table, without the columns added at writing; `read_batches` inverts it.

    Their trajectories must have the same keys and dtypes.
    """
    sizes = [one.batch_size[0] for one in trajectories]

    def of_rows(values: Iterable[Any]) -> list[Any]:
        return [value for value, size in zip(values, sizes, strict=True) for _ in range(size)]

    all_rows = concat_padded_tensors([one.exclude(_NOT_STORED) for one in trajectories]).detach()
    places = [row for size in sizes for row in range(size)]
    columns = {
        "prompt_id": of_rows(str(one.prompt_id) for one in episodes),
        "row": places,
        "num_rows": of_rows(sizes),
        "sample": all_rows["sample_index"].tolist() if "sample_index" in all_rows else places,
        "attempt": of_rows(one.attempt for one in episodes),
        "reward": _array(all_rows["rewards"], None),
        "server": of_rows(",".join(sorted(one.servers)) for one in episodes),
    }
    is_whole = of_rows(_is_whole(str(one.prompt_id), stored_share) for one in episodes)
    kept = all_rows if all(is_whole) else all_rows[torch.tensor(is_whole)]
    rows = {key: _array(kept[key], real_entries(kept, key)) for key in set(kept.keys()) - {"attention_mask"}}
    texts = _segments(itertools.compress(of_rows(tokenizers), is_whole), rows)
    stored = {"segments": pa.array(texts, _SEGMENTS)} | {key: rows[key] for key in PER_TOKEN}
    if more := sorted(rows.keys() - {*PER_TOKEN, "rewards"}):
        stored["more"] = pa.StructArray.from_arrays([rows[key] for key in more], more)
    if not all(is_whole):  # rows that are not stored are null, with the types of the others
        ranks = itertools.count()
        taken = pa.array([next(ranks) if is_stored else None for is_stored in is_whole], pa.int64())
        stored = {name: array.take(taken) for name, array in stored.items()}
    return pa.table(columns | stored, metadata={_DTYPES: json.dumps(_dtypes(trajectories[0]))})


def _dtypes(trajectory: TensorDict) -> dict[str, str]:
    """Return the dtype names of the stored keys."""
    tensors = sorted((key, tensor) for key, tensor in trajectory.items() if key != _NOT_STORED)
    return {key: str(tensor.dtype).removeprefix("torch.") for key, tensor in tensors}


def _is_whole(prompt_id: str, stored_share: float) -> bool:
    """Return whether tokens and texts of a prompt's episodes are stored."""
    return zlib.crc32(prompt_id.encode()) < stored_share * 2**32


class Replay:
    """Replaces the executor on rank 0: returns the stored batches of the engine's version in order."""

    def __init__(
        self, folder: str, engine: InferenceEngine, assemble: Callable[[list[TensorDict]], Any] = assemble_batch
    ) -> None:
        self._folder = RunFolder(folder).rollouts
        self._engine, self._assemble = engine, assemble
        self._left: dict[Path, deque[list[TensorDict]]] = {}

    def submit(self, row: Row, workflow: RolloutWorkflow) -> None:
        """Do nothing: the episode is stored."""

    def wait(self, count: int, timeout: float | None = None, should_accept: ShouldAccept | None = None) -> TensorDict:
        return assemble_batch(self._next("step"))

    def prepare_batch(
        self, dataloader: Dataloader, workflow: RolloutWorkflow, should_accept: ShouldAccept | None = None
    ) -> Any:
        return self._assemble(self._next("step"))

    def run_all(self, rows: Sequence[Row], workflow: RolloutWorkflow, *, is_evaluation: bool = False) -> Any:
        """Return the next batch, or the next one that was evaluated."""
        return assemble_batch(self._next("eval_step")) if is_evaluation else self._assemble(self._next("step"))

    def _next(self, name: str) -> list[TensorDict]:
        path = self._folder / f"{name}_{self._engine.get_version()}"
        if path not in self._left:
            self._left[path] = deque(read_batches(path))
        if not self._left[path]:
            raise ConfigError(
                f"{path} must hold each batch that the script asks for: got no more. "
                "Replay with the script and config of the run."
            )
        return self._left[path].popleft()


def read_batches(path: Path) -> list[list[TensorDict]]:
    """Return the trajectories of the batches of a name in the order in which they were written."""
    return [_read_batch(file) for file in batch_files(path).values()]


def _read_batch(path: Path) -> list[TensorDict]:
    rows = list(read_file(path))
    if lacking := [row["prompt_id"] for row in rows if row["input_ids"] is None]:
        raise ConfigError(
            f"a batch that is replayed must have all its tokens: got {path}, which lacks those of prompt {lacking[0]}. "
            "Replay a step of a run with rollout.stored_share=1."
        )
    episodes: list[list[TensorDict]] = []
    with reading(path, RuntimeError):  # of torch
        dtypes = json.loads(metadata_of(path)[_DTYPES])
        for row in rows:
            if row["row"] == 0:
                episodes.append([])
            episodes[-1].append(_trajectory(row, dtypes))
        trajectories = [concat_padded_tensors(one) for one in episodes]
        layout = layout_of(trajectories)
    if "image_grid_thw" in layout:
        raise ConfigError(f"a run that is replayed must have no images: got {path}, which lacks their patches.")
    return trajectories


def _trajectory(row: Mapping[str, Any], dtypes: Mapping[str, str]) -> TensorDict:
    """Return one row as a trajectory."""
    values = {key: row[key] for key in PER_TOKEN} | row["more"]
    values |= {"attention_mask": [1] * len(row["input_ids"]), "rewards": row["reward"]}
    tensors = {key: torch.tensor([value], dtype=getattr(torch, dtypes[key])) for key, value in values.items()}
    return TensorDict(tensors, batch_size=[1])


def _array(tensor: torch.Tensor, real: torch.Tensor | None) -> pa.Array:
    """Return `[B, ...]` as one entry per row, without the padding outside of the mask `real [B, L]`."""
    values = tensor if real is None else tensor[real]
    is_known = not values.is_floating_point() or values.dtype in _NUMPY_FLOATS
    array = pa.array((values if is_known else values.float()).reshape(-1).numpy())
    for dim in reversed(range(1, values.ndim)):
        array = _lists(np.full(values.shape[:dim].numel(), values.shape[dim]), array)
    return array if real is None else _lists(real.sum(1).numpy(), array)


def _lists(lengths: np.ndarray[Any, Any], values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(np.concatenate([[0], lengths.cumsum()]).astype(np.int32), values)


def _segments(tokenizers: Iterable[Any], rows: Mapping[str, pa.Array]) -> list[list[dict[str, str]] | None]:
    """Return the texts of each row, alternating between given and sampled."""
    rows_of_segments: list[list[dict[str, str]] | None] = []
    for tokenizer, tokens, loss_mask in zip(tokenizers, rows["input_ids"], rows["loss_mask"], strict=True):
        if tokenizer is None:
            rows_of_segments.append(None)
            continue
        segments, start, ids = [], 0, tokens.as_py()
        for is_sampled, run in itertools.groupby(map(bool, loss_mask.as_py())):
            end = start + len(list(run))
            text = (
                tokenizer.decode(ids[start:end]).encode(errors="replace").decode()
            )  # a lone surrogate can't be stored
            segments.append({"sampled" if is_sampled else "given": text})
            start = end
        rows_of_segments.append(segments)
    return rows_of_segments


KEYS = ("attention_mask", "loss_mask", "group_index", "advantages", "logprobs", "proximal_logprobs")
"""Keys of a batch that `update_of` reads if present."""


def is_stored(config: InferenceEngineConfig) -> bool:
    """Return whether a run stores numbers of its updates."""
    return bool(config.fileroot) and config.stored_share > 0 and not config.replay_from


def update_of(actor: Any, batch: TensorDict) -> Update | None:
    """Return the numbers to store of this rank's share of a batch; None, on all ranks alike, if there are none.

    These are `advantages`, `logprob_gap` (the trainer's logprob minus the server's, before the update) and `log_ratio`
    (the logprob in the update minus that before), as far as they were computed; nan elsewhere. `actor.per_token` holds
    the numbers of the update for all real tokens; the update skips tokens without advantage.
    """
    per_token: Mapping[str, torch.Tensor] = getattr(actor, "per_token", {})
    if not {"advantages", "group_index"} <= set(batch.keys()):
        return None
    real, sampled = batch["attention_mask"].bool(), batch["loss_mask"].bool()
    columns = {"advantages": batch["advantages"]}
    if "proximal_logprobs" in batch:
        gap = batch["proximal_logprobs"] - batch["logprobs"]
        columns["logprob_gap"] = torch.where(sampled, gap, torch.nan)
    lengths = real.sum(1).tolist()
    numbers = {key: values for key, values in per_token.items() if len(values) == sum(lengths)}
    numbers |= {key: values[real] for key, values in columns.items()}
    rounded = {key: _rounded(values.float().cpu().numpy()) for key, values in numbers.items()}
    return Update(batch["group_index"].tolist(), lengths, rounded)


def updates_of(actor: Any, batch: Any, gather: Callable[[Update], list[Update]]) -> list[Update]:
    """Return the updates of all ranks' shares of a batch on rank 0 (collective), or of all workers on a master."""
    if not isinstance(batch, TensorDict):
        return cast("list[Update]", actor.updates_of(batch))
    update = update_of(actor, batch)
    return [] if update is None else gather(update)


def write_update(batch: Path, updates: Sequence[Update], is_whole: Sequence[bool]) -> None:
    """Write the ranks' updates for a stored batch; `is_whole` says which of its groups are stored with tokens."""
    rows = [row for update in updates for row in _rows(update)]
    rows.sort(key=lambda row: row[0])  # ranks have whole groups, in order
    names = sorted({key for _, numbers in rows for key in numbers})
    columns = {key: [numbers.get(key) if is_whole[group] else None for group, numbers in rows] for key in names}
    arrays = {key: pa.array(values, pa.list_(pa.float32())) for key, values in columns.items()}
    write_table(update_file(batch), pa.table(arrays))


def _rows(update: Update) -> list[tuple[int, dict[str, np.ndarray[Any, Any]]]]:
    ends = np.cumsum(update.lengths)[:-1]
    columns = {key: np.split(values, ends) for key, values in update.numbers.items()}
    return [(group, {key: rows[i] for key, rows in columns.items()}) for i, group in enumerate(update.groups)]


def _rounded(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    bits = np.ascontiguousarray(values).view(np.int32)
    return (bits & np.int32(-1 << _LOST_BITS)).view(np.float32)
