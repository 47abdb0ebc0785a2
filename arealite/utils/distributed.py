"""Joining torch.distributed and reducing plain numbers over it.

Several engines of a process share the default process group: the first `join_default_group` creates it (from torchrun's
environment, or alone in this process when there is none) and the last `leave_default_group` destroys it. A group that
someone else created is used and left alone. Numbers and flags travel over gloo, so they never wait for a GPU.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from arealite.utils import beacon

T = TypeVar("T")

_lock = threading.Lock()
_generations = itertools.count()
_members = 0
_is_ours = False


def join_default_group(timeout_s: float) -> None:
    """Make sure that the default process group exists and hold on to it until `leave_default_group`."""
    global _members, _is_ours
    with _lock:
        if not dist.is_initialized():
            with beacon.waiting("all ranks to meet", on="ranks"):
                _create_default_group(timedelta(seconds=timeout_s))
            _is_ours = True
        _members += 1


def leave_default_group() -> None:
    """Let go of the default process group; the last one out destroys it if `join_default_group` created it."""
    global _members, _is_ours
    with _lock:
        _members -= 1
        if _members == 0 and _is_ours:
            dist.destroy_process_group()
            _is_ours = False


def _create_default_group(timeout: timedelta) -> None:
    backend = "gloo"
    if torch.cuda.is_available():
        # SGLang's weight-update group can't be formed otherwise.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    store, rank, world_size = _meet(timeout)
    own_keys = PrefixStore(f"arealite-{next(_generations)}", store)
    dist.init_process_group(backend, store=own_keys, rank=rank, world_size=world_size, timeout=timeout)


@functools.cache
def _meet(timeout: timedelta) -> tuple[Store, int, int]:
    """Return store, rank and world size. Once per process: a new store would find the addresses of the last group."""
    if "RANK" in os.environ:
        return next(iter(rendezvous("env://", timeout=timeout)))
    return HashStore(), 0, 1


def current_device() -> torch.device:
    """Return the accelerator of this rank, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def all_reduce(
    values: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the reduction of `values` over the group, on their own device; they are left as they are."""
    reduced = values.detach().cpu().clone()
    with beacon.waiting("a sum over all ranks", on="ranks"):
        dist.all_reduce(reduced, op=op, group=group)
    beacon.tick()
    return reduced.to(values.device)


def all_reduce_numbers(
    values: Sequence[float], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Reduce each number over the group, in float64."""
    return all_reduce(torch.tensor(list(values), dtype=torch.float64), op, group).tolist()


def agreed(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run one phase on this rank and return its result; raise on every rank if it failed on any (collective)."""
    try:
        outcome = action()
    except Exception as error:
        raise_on_every_rank(error, group)
        raise
    raise_on_every_rank(None, group)
    return outcome


def raise_on_every_rank(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise this rank's error, or RuntimeError with the first failed rank's text. Every rank calls this."""
    texts: list[str | None] = [None] * dist.get_world_size(group)
    with beacon.waiting("the outcome on all ranks", on="ranks"):
        dist.all_gather_object(texts, None if error is None else f"{type(error).__name__}: {error}", group=group)
    beacon.tick()
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise RuntimeError(f"rank {rank} failed: {text}")
