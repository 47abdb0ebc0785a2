"""Numbers per token of an update, stored beside its batch as `rollouts/step_<N>/_update/<K>.parquet`.

Invariant: row i belongs to row i of `<K>.parquet` and is null where that has no tokens. Numbers keep 10 bits of
mantissa, as half precision, and the range of float32. Tools that read the folder of a step as one data set ignore names
that begin with `_`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from tensordict import TensorDict

from arealite.api.cli_args import InferenceEngineConfig
from arealite.rollout.account.rollout_file import update_file, write_table

_LOST_BITS = 13  # of float32's mantissa: the rest compresses to about half


@dataclass(frozen=True)
class Update:
    """One rank's part: group and length per row, and numbers per token without padding."""

    groups: list[int]
    lengths: list[int]
    numbers: dict[str, np.ndarray[Any, Any]]


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
