"""Batches: TensorDicts of `[B, S]` tensors, padded on the right.

Padding is False in `attention_mask`, -1 in `versions`, and the caller's `pad_value` elsewhere.
"""

# B sequences, S padded tokens

from collections.abc import Sequence

import torch
from tensordict import TensorDict

_ABSENT = {"attention_mask": 0, "versions": -1}


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
    rows = {key: _concat([d[key] for d in tensor_dicts], _ABSENT.get(key, pad_value)) for key in keys}
    return TensorDict(rows, batch_size=[sum(d.batch_size[0] for d in tensor_dicts)])


def _concat(tensors: list[torch.Tensor], pad_value: float) -> torch.Tensor:
    if tensors[0].dim() >= 2:
        longest = max(tensor.shape[1] for tensor in tensors)
        tensors = [one if one.shape[1] == longest else _pad(one, longest, pad_value) for one in tensors]
    return torch.cat(tensors)


def _pad(tensor: torch.Tensor, length: int, value: float) -> torch.Tensor:
    sizes = [0, 0] * (tensor.dim() - 2) + [0, length - tensor.shape[1]]  # last dimension first
    return torch.nn.functional.pad(tensor, sizes, value=value)
