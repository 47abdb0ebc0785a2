"""A stand-in for GPUs on a machine without one: tensors on `cuda` have no numbers, those on the CPU are real.

The code of a GPU runs: its branches, kernels' shapes and types, FSDP's streams, one rank of a fake process group. A
tensor of another device than the others, a product of two types or a shape that depends on numbers raises; what makes
the CPU wait for the GPU is noted.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map_only

import arealite
from arealite.engine.checkpointing import CheckpointedEngine
from arealite.engine.parallel.mesh import Mesh
from arealite.utils import distributed

CUDA = torch.device("cuda", 0)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXING = ("aten::index", "aten::index_put_", "aten::_index_put_impl_")
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_PACKAGE = str(Path(arealite.__file__).parent)


class FakeCuda(FakeTensorMode):
    """Runs operations on the CPU as they are, and those that touch `cuda` without numbers."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.waits: list[str] = []
        """Functions of the package in which the CPU waits for the GPU."""
        self.number = 1.0
        """What every number that is read turns out to be."""
        self.is_capturing = False
        """Whether a CUDA graph records, which would copy from the same place in the CPU's memory in each replay."""
        self.has_model = False
        """Whether the model is on the device; then no tensor is on the meta device but those of torch's own kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(one, DTensor) for one in leaves):
            return NotImplemented  # it takes itself apart
        if self.has_model and kwargs.get("device") == torch.device("meta"):
            kwargs["device"] = CUDA
        if not any(isinstance(one, FakeTensor) for one in leaves) and _kind(kwargs.get("device")) != "cuda":
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self.wait()
            return torch.tensor(self.number).to(args[0].dtype).item()
        if func in _COPIES:
            source, target = (args[0], kwargs.get("device")) if func is _COPIES[0] else (args[1], args[0].device)
            kinds = source.device.type, _kind(target) or source.device.type
            is_blocking = not (kwargs.get("non_blocking") or (func is _COPIES[1] and len(args) > 2 and args[2]))
            if kinds == ("cuda", "cpu"):
                self.wait()
                read = torch.full(source.shape, self.number).to(kwargs.get("dtype") or source.dtype)
                return read if func is _COPIES[0] else args[0].copy_(read)
            if kinds == ("cpu", "cuda") and (is_blocking or self.is_capturing) and source.ndim:
                self.wait()
        elif func.name().partition(".")[0] in _INDEXING and args[0].device.type == "cuda":
            places = [one for one in args[1] if one is not None]
            if any(one.device.type == "cpu" and one.ndim for one in places):
                self.wait()  # until the indices are copied
        elif func.name().partition(".")[0] in _PRODUCTS:
            dtypes = {one.dtype for one in leaves if isinstance(one, torch.Tensor)}
            assert len(dtypes) == 1, f"a product must have one dtype: got {dtypes}"  # cuBLAS refuses, torch's meta not
        args, kwargs = tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def wait(self) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        if frame is None:
            self.waits.append("a test")
        else:
            function = frame.f_code.co_qualname.partition(".<locals>")[0]
            self.waits.append(f"{frame.f_code.co_filename[len(_PACKAGE) + 1 :]}:{function}")

    def _as_fake(self, tensor: torch.Tensor) -> FakeTensor:
        fake = tensor if isinstance(tensor, FakeTensor) else self.from_tensor(tensor)
        fake.constant = None
        return fake


def _kind(device: torch.device | str | None) -> str | None:
    return None if device is None else torch.device(device).type


class _Stream:
    """Work that takes no time; a stream, an event, and a graph."""

    device, cuda_stream = CUDA, 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def nothing(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = replay = nothing

    def record_event(self, *_: Any) -> _Stream:
        return self


class _Guard(torch._C._acc.DeviceGuard):
    """Says which device is the current one, which a build of torch for CPUs can't for CUDA."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.CUDA


_GUARD = _Guard()


@contextlib.contextmanager
def fake_cuda(world_size: int = 1) -> Iterator[FakeCuda]:
    """Run the body on rank 0 of `world_size` ranks, each with a GPU."""
    mode = FakeCuda()

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def to_all(found: list[Any], value: Any, group: Any = None) -> None:
        found[:] = [value] * len(found)

    def listed(tensor: FakeTensor) -> Any:
        mode.wait()
        return torch.full(tensor.shape, mode.number).to(tensor.dtype).tolist()

    @contextlib.contextmanager
    def recorded(*_: Any, **__: Any) -> Iterator[None]:
        mode.is_capturing = True
        yield
        mode.is_capturing = False

    make = torch.Tensor._make_subclass

    def without_device(*args: Any, **options: Any) -> torch.Tensor:
        # Autograd, in C++, takes the tensor for one of the meta device, as a build for CPUs has no streams of CUDA.
        return make(*args, **options | ({"dispatch_device": False} if "dispatch_device" in options else {}))

    on_cuda = {
        "is_available": lambda: True,
        "device_count": lambda: world_size,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3",
        "get_device_capability": lambda *_: (9, 0),
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": _Stream,
        "default_stream": _Stream,
        "get_rng_state": lambda *_: torch.zeros(1, dtype=torch.uint8),
        "set_rng_state": nothing,
        "Stream": _Stream,
        "Event": _Stream,
        "CUDAGraph": _Stream,
        "graph": recorded,
        "graph_pool_handle": nothing,
        "synchronize": lambda *_: mode.wait(),
        **dict.fromkeys(("max_memory_allocated", "memory_allocated"), lambda *_: 0),
        **dict.fromkeys(
            ("_lazy_init", "set_device", "reset_peak_memory_stats", "empty_cache", "manual_seed_all"), nothing
        ),
    }
    patches: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, value) for name, value in on_cuda.items()),
        (torch.backends.cuda, "is_flash_attention_available", lambda: True),
        (torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
        (torch.Tensor, "record_stream", nothing),
        (torch.Tensor, "_make_subclass", without_device),
        (fake_tensor, "init_gpu_context", nothing),
        (FakeTensor, "is_cuda", property(lambda tensor: tensor.device.type == "cuda")),
        (FakeTensor, "is_meta", property(lambda tensor: tensor.device.type == "meta")),
        (FakeTensor, "data_ptr", lambda tensor: 0),
        (FakeTensor, "tolist", listed),
        (DTensor, "device", property(lambda tensor: tensor._local_tensor.device)),
        (dist, "all_gather_object", to_all),
        (dist, "broadcast_object_list", nothing),
        (distributed, "_members", 0),  # engines that join the group and never leave it
        (Mesh, "require_same_rows", nothing),  # other ranks have none
        (CheckpointedEngine, "_join_state_group", nothing),
    ]
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 21).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")  # by device type
    torch._C._acc.register_python_privateuseone_device_guard(_GUARD)  # the only type that Python may give one
    own, guards[1], guards[20] = guards[1], guards[20], None
    with contextlib.ExitStack() as stack:
        stack.callback(guards.__setitem__, 1, own)
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device="cuda")` copies by an operation
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(mode)
        yield mode
