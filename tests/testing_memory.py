"""Bytes of tensors that live at the same time, on any device, counted exactly."""

import weakref
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts the storages that operations inside of the block make: `peak` of their bytes lived at once.

    FSDP frees what it has gathered by a resize of its storage to 0, which no operation tells.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "PeakBytes":
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            resized = resize(storage, size)
            self._count(storage)
            return resized

        self._patch.setattr(torch.UntypedStorage, "resize_", counted)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, DTensor):  # its own storage has the size of the whole, but no memory
                tensor = tensor._local_tensor
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._set, key, 0)
        self._set(key, size)

    def _set(self, key: int, size: int) -> None:
        self.live += size - self._sizes.pop(key, 0)
        if size:
            self._sizes[key] = size
        self.peak = max(self.peak, self.live)
