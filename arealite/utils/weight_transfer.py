"""Broadcasts weights from the trainer (rank 0, which hosts the store) to servers (ranks 1..), in an agreed order.

The store's prefixes match those of torch.distributed's own groups, so SGLang and vLLM servers can be receivers.
Invariant: nothing waits past its deadline. A failed transfer or a dead peer closes the group, which fails the other
side at once, except for a gloo write in progress. The next group needs a new name or port. NCCL is written to the same
rules but was not run: it connects at the first transfer, and a peer that dies then may block for longer.
"""

import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from arealite.utils.network import LOOPBACK, host_ip

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
_LOOPBACKS = (LOOPBACK, "localhost", "::1")
_FORMED = "formed"  # key that rank 0 sets when every rank is there


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Spec = TypeVar("Spec", bound=_Named)


@dataclass
class BroadcastGroup:
    """One sender (rank 0) and its receivers."""

    name: str
    rank: int
    world_size: int
    timeout_s: float  # deadline of one bucket
    device: torch.device  # where tensors must lie: NCCL moves only those of a GPU
    backend: Any = field(repr=False)  # a backend of c10d, for which torch has no complete types; None once closed
    store: Store | None = field(repr=False)


def join_group(
    address: str,
    port: int,
    rank: int,
    world_size: int,
    name: str,
    *,
    backend: Literal["gloo", "nccl"] = "gloo",
    timeout_s: float = 120.0,
) -> BroadcastGroup:
    """Join group `name` at `address:port`, where rank 0 listens. Every rank calls this.

    Rank 0 returns once the store has counted every rank, others once rank 0 has said so: a backend may connect late.
    """
    if not 0 <= rank < world_size or world_size < 2:
        raise ValueError(
            f"a broadcast group must have at least 2 ranks, numbered from 0: got rank {rank} of {world_size}. "
            "Count the sender and every receiver."
        )
    deadline = time.monotonic() + timeout_s
    # Half of the time to find the store, because its client retries once more after its own timeout.
    store_timeout = timedelta(seconds=timeout_s if rank == 0 else timeout_s / 2)
    try:
        store = TCPStore(address, port, world_size, rank == 0, store_timeout, wait_for_workers=True)
        timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        store.set_timeout(timeout)
        group_store = PrefixStore(f"{name}/", PrefixStore(name, store))
        options: Any  # torch has no complete types for it
        if backend == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            transport: Any = dist.ProcessGroupNCCL(PrefixStore("cuda/", group_store), rank, world_size, options)
        else:
            device = torch.device("cpu")
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timeout
            options._threads = 2
            # A mesh by the address that leads to rank 0; this host's name may resolve to a dead interface.
            own_address = LOOPBACK if address in _LOOPBACKS else host_ip(address)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
            transport = dist.ProcessGroupGloo(PrefixStore("cpu/", group_store), rank, world_size, options)
        if rank == 0:
            group_store.set(_FORMED, "")
        else:
            group_store.wait([_FORMED], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except RuntimeError as error:
        raise ConnectionError(
            f"broadcast group {name!r} must form within {timeout_s:g} s: rank {rank} of {world_size} at "
            f"{address}:{port} got {_first_line(error)}. "
            f"Check that all {world_size} ranks joined with the same name, address and port."
        ) from error
    return BroadcastGroup(name, rank, world_size, timeout_s, device, transport, store)


def buckets_without(buckets: Iterable[Iterable[Spec]], left_out: Container[str]) -> list[list[Spec]]:
    """Return the specs, by bucket, of the tensors that are sent if those of these names are not."""
    kept = ([spec for spec in bucket if spec.name not in left_out] for bucket in buckets)
    return [bucket for bucket in kept if bucket]


def send_bucket(group: BroadcastGroup, tensors: Iterable[torch.Tensor], *, timeout_s: float | None = None) -> None:
    """Send the tensors of one bucket, in the order of the specs that the receivers were told."""
    _broadcast(group, [tensor.detach().to(group.device).contiguous() for tensor in tensors], timeout_s)


def receive_bucket(group: BroadcastGroup, specs: Iterable[tuple[str, Sequence[int], str]]) -> dict[str, torch.Tensor]:
    """Receive one bucket into fresh tensors, by name; `specs` are names, shapes and dtypes, as in a `ParamSpec`."""
    bucket = {name: torch.empty(shape, dtype=DTYPES[dtype], device=group.device) for name, shape, dtype in specs}
    _broadcast(group, list(bucket.values()))
    return bucket


def close_group(group: BroadcastGroup) -> None:
    """Leave the group, which fails its peers' transfers at once; our own wait until their deadline. Idempotent."""
    backend, group.backend, group.store = group.backend, None, None
    if backend is not None:
        backend.abort()


def _broadcast(group: BroadcastGroup, tensors: list[torch.Tensor], timeout_s: float | None = None) -> None:
    """Broadcast one after the other (all ranks keep the same order) under one deadline for the whole list."""
    if group.backend is None:
        raise ConnectionError(f"broadcast group {group.name!r} must be open: got a closed one. Join a new group.")
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=group.timeout_s if timeout_s is None else timeout_s)
    deadline = time.monotonic() + options.timeout.total_seconds()
    try:
        works = [group.backend.broadcast([tensor], options) for tensor in tensors]
        for work in works:
            if group.device.type == "cuda":
                _poll(work, deadline)
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except RuntimeError as error:
        close_group(group)
        raise ConnectionError(
            f"broadcast in {group.name!r} must finish within {options.timeout.total_seconds():g} s, all peers alive: "
            f"rank {group.rank} of {group.world_size} got {_first_line(error)}. Join a new group."
        ) from error


def _poll(work: Any, deadline: float) -> None:
    """Block until a transfer of NCCL has ended, since its `wait` only makes a stream wait."""
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError("the transfer did not end")
        time.sleep(0.001)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
