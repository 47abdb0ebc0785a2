"""Batches: TensorDicts of `[B, S]` tensors, padded on the right; stacked, and packed into micro-batches and back.

Padding is False in `attention_mask`, -1 in `versions`, and the caller's `pad_value` elsewhere. Packing drops it, and
concatenates: `[B, S, ...]` tensors become `[N, ...]`, `[B]` tensors keep one entry per row. It adds `cu_seqlens` (int32
`[B + 1]`), `position_ids [N]` (restarting at each row) and `segment_ids [N]` (row of a token). Keys of `RAGGED` are
`[B, L, ...]`, with any number of entries per row (the kept sets of its tokens, the patches of its images) one after the
other; packed `[M, ...]`. `image_grid_thw [B, I, 3]` stays as it is, 0 for images that a row lacks. Invariant: every
row is in exactly one micro-batch; one longer than `max_tokens` gets a micro-batch of its own. Rows may come in units,
such as pairs, which stay together.
"""

# B rows, S padded tokens, N packed tokens; L padded and M packed entries of a ragged key

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from tensordict import TensorDict

# Keys of any number of entries per row: the key of how many a token `[B, S]` or, as a grid, an image `[B, I, 3]` has.
RAGGED = {"kept_ids": "kept_counts", "pixel_values": "image_grid_thw"}
INPUTS = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")  # of a model; only some see images
TOKENS = (*INPUTS, "kept_ids", "kept_counts")  # what log-probabilities need
TensorsT = TypeVar("TensorsT", torch.Tensor, TensorDict)
ABSENT = {"attention_mask": 0, "versions": -1}


def concat_padded_tensors(tensor_dicts: Sequence[TensorDict], pad_value: float = 0.0) -> TensorDict:
    """Stack the rows of several batches, padding every `[B, S, ...]` tensor on the right to the longest of its key."""
    if not tensor_dicts:
        raise ValueError(
            "tensor_dicts must have at least one entry: got an empty list. Concatenate what was collected."
        )
    keys = list(tensor_dicts[0].keys())
    for index, tensor_dict in enumerate(tensor_dicts):
        if set(tensor_dict.keys()) != set(keys):
            raise ValueError(
                f"all batches must have the same keys: got {sorted(keys)} in entry 0 and "
                f"{sorted(tensor_dict.keys())} in entry {index}. Add the missing keys or drop the others."
            )
    rows = {key: _concat([d[key] for d in tensor_dicts], ABSENT.get(key, pad_value)) for key in keys}
    return TensorDict(rows, batch_size=[sum(d.batch_size[0] for d in tensor_dicts)])


def _concat(tensors: list[torch.Tensor], pad_value: float) -> torch.Tensor:
    if tensors[0].dim() >= 2:
        longest = max(tensor.shape[1] for tensor in tensors)
        tensors = [tensor if tensor.shape[1] == longest else _pad(tensor, longest, pad_value) for tensor in tensors]
    return torch.cat(tensors)


def _pad(tensor: torch.Tensor, length: int, value: float) -> torch.Tensor:
    sizes = [0, 0] * (tensor.dim() - 2) + [0, length - tensor.shape[1]]  # last dimension first
    return torch.nn.functional.pad(tensor, sizes, value=value)


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows, and where they came from."""

    row_indices: torch.Tensor
    packed: TensorDict

    @property
    def num_tokens(self) -> int:
        return int(self.packed["input_ids"].shape[0])


def split_balanced(lengths: Sequence[int], num_groups: int, max_tokens: int | None = None) -> list[list[int]]:
    """Assign indices, longest first, each to the group with the fewest tokens; indices ascend within a group.

    If a group would then exceed `max_tokens` and best fit does not, the groups are those of best fit, and some may be
    empty. More groups never make the largest one larger, so ranks may agree on a number that fits all. Lengths count as
    at most `max_tokens`.
    """
    sizes = [length if max_tokens is None else min(length, max_tokens) for length in lengths]
    groups, largest = _split_evenly(sizes, num_groups)
    if max_tokens is not None and largest > max_tokens and len(fitted := _best_fit(sizes, max_tokens)) <= num_groups:
        groups = fitted + [[] for _ in range(num_groups - len(fitted))]
    return [sorted(group) for group in groups]


def count_micro_batches(lengths: Sequence[int], min_groups: int = 1, max_tokens: int | None = None) -> int:
    """Return a number of groups that `split_balanced` keeps within `max_tokens`: at least `min_groups` if there are as
    many rows."""
    num_groups = min(min_groups, len(lengths))
    if max_tokens is None:
        return num_groups
    return max(num_groups, len(_best_fit([min(length, max_tokens) for length in lengths], max_tokens)))


def _longest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda index: -sizes[index])


def _split_evenly(sizes: Sequence[int], num_groups: int) -> tuple[list[list[int]], int]:
    """Assign indices, longest first, each to the group with the smallest load; return the largest load too."""
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    loads = [(0, group) for group in range(num_groups)]  # a heap
    for index in _longest_first(sizes):
        load, group = loads[0]
        groups[group].append(index)
        heapq.heapreplace(loads, (load + sizes[index], group))
    return groups, max(loads, default=(0, 0))[0]


def _best_fit(sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Assign indices, longest first, each to the fullest group that has room, else to a new one."""
    groups: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # ascending, with the group
    for index in _longest_first(sizes):
        place = bisect.bisect_left(rooms, (sizes[index], -1))
        room, group = rooms.pop(place) if place < len(rooms) else (max_tokens, len(groups))
        if group == len(groups):
            groups.append([])
        groups[group].append(index)
        bisect.insort(rooms, (room - sizes[index], group))
    return groups


def split_rows(
    lengths: Sequence[int], num_groups: int, max_tokens: int | None = None, *, rows_per_unit: int = 1
) -> list[list[int]]:
    """Assign rows to groups as `split_balanced` does, by the `unit_lengths`; rows of a unit follow each other."""
    units = split_balanced(lengths, num_groups, max_tokens)
    return [[unit * rows_per_unit + row for unit in group for row in range(rows_per_unit)] for group in units]


def unit_lengths(attention_mask: torch.Tensor, rows_per_unit: int = 1) -> list[int]:
    """Return the tokens of each unit of `rows_per_unit` rows of a mask `[B, S]`."""
    num_rows = attention_mask.shape[0]
    if num_rows % rows_per_unit:
        raise ValueError(
            f"the rows of a rank must come in units of {rows_per_unit}: got {num_rows} rows. Keep units together."
        )
    counts_B = np.count_nonzero(attention_mask.cpu().numpy(), axis=1)  # 13 times as fast as torch's sum of a mask
    return counts_B.reshape(-1, rows_per_unit).sum(axis=1).tolist()


def real_entries(batch: TensorDict, key: str) -> torch.Tensor | None:
    """Return the bool mask `[B, S]` or `[B, L]` of the entries of a key that are not padding; None for a key that keeps
    its padding or has none."""
    tensor, mask_BS = batch[key], batch["attention_mask"].bool()
    if key in RAGGED:
        return torch.arange(tensor.shape[1], device=tensor.device) < _num_entries(batch[RAGGED[key]])[:, None]
    return mask_BS if is_per_token(key, tensor, mask_BS.shape[1]) else None


def trimmed_rows(batch: TensorDict, row_indices: Sequence[int]) -> TensorDict:
    """Return the given rows of a padded batch, without the padding that follows the longest of them."""
    rows, trimmed = torch.tensor(row_indices, dtype=torch.long), {}
    mask_BS = batch["attention_mask"].index_select(0, rows)
    width = 1 + np.flatnonzero(mask_BS.any(dim=0).numpy()).max(initial=0)
    length = mask_BS.shape[1]
    per_row = [t for key, t in batch.items() if key not in RAGGED and not is_per_token(key, t, length)]
    while width in {tensor.shape[1] for tensor in per_row if tensor.ndim > 1}:  # else they would look like tokens
        width += 1
    for key, tensor in batch.items():
        if is_per_token(key, tensor, length):
            tensor = tensor[:, :width]
        elif key in RAGGED:
            tensor = tensor[:, : max(_num_entries(batch[RAGGED[key]][rows]).tolist(), default=0)]
        trimmed[key] = tensor.index_select(0, rows)
    return TensorDict(trimmed, batch_size=[len(rows)])


def _num_entries(counts: torch.Tensor) -> torch.Tensor:
    """Return the number of entries `[B]` per row of a ragged key, from its counts per token or grids per image."""
    return (counts.prod(-1) if counts.ndim == 3 else counts).sum(dim=1)


def is_per_token(key: str, tensor: torch.Tensor, length: int) -> bool:
    """Return whether a key of a batch that is padded to `length` has an entry per token."""
    return key not in RAGGED and key != "image_grid_thw" and tensor.ndim > 1 and tensor.shape[1] == length


def pack_rows(batch: TensorDict, row_indices: Sequence[int]) -> MicroBatch:
    """Pack the given rows of a padded batch; a key that is not `[B, S, ...]` keeps one entry per row."""
    indices = torch.tensor(list(row_indices), dtype=torch.long)
    mask_BS = batch["attention_mask"][indices].bool()
    length, rows_B = mask_BS.shape[1], torch.arange(len(indices))
    places_N = torch.from_numpy(np.flatnonzero(mask_BS.numpy()))  # by number, which is much faster than by a mask
    bounds = torch.searchsorted(places_N, length * torch.arange(len(indices) + 1))
    rows_N = rows_B.repeat_interleave(bounds.diff())
    tokens_N = places_N + (length * (indices - rows_B)).index_select(0, rows_N)
    packed = {}
    for key, tensor in batch.exclude("attention_mask").items():
        if is_per_token(key, tensor, length):
            packed[key] = tensor.flatten(0, 1).index_select(0, tokens_N)
        elif key in RAGGED:
            rows = batch.select(key, RAGGED[key], "attention_mask")[indices]
            packed[key] = rows[key][real_entries(rows, key)]
        else:
            packed[key] = tensor[indices]
    packed["cu_seqlens"] = bounds.to(torch.int32)
    packed["position_ids"] = torch.arange(len(rows_N)) - bounds.index_select(0, rows_N)
    packed["segment_ids"] = rows_N
    return MicroBatch(indices, TensorDict(packed, batch_size=[]))


def on_device(values: TensorsT, device: torch.device) -> TensorsT:
    """Copy to a device without waiting for what it computes, as a copy from pageable memory would."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def unpack_rows(values: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch], batch: TensorDict) -> torch.Tensor:
    """Put one `[N]` tensor per micro-batch back into `[B, S]`, with 0 where there was padding."""
    mask_BS = batch["attention_mask"].bool()
    dtype = values[0].dtype if values else torch.float32
    padded_BS = torch.zeros(mask_BS.shape, dtype=dtype, device=mask_BS.device)
    at_once = torch.cat(list(values)).to(padded_BS).split([len(value) for value in values]) if values else ()
    for value_N, micro_batch in zip(at_once, micro_batches, strict=True):  # one wait for the device
        rows_BS = torch.zeros_like(padded_BS[micro_batch.row_indices])
        rows_BS[mask_BS[micro_batch.row_indices]] = value_N
        padded_BS[micro_batch.row_indices] = rows_BS
    return padded_BS
