"""Broadcasts weights from ranks of the trainer to servers, in an agreed order.

Every sender is rank 0 of a group of its own, and the servers are ranks 1.. of each. All groups of an update meet at one
port of the trainer's rank 0, one after the other. The store's prefixes match those of torch.distributed's own groups,
so SGLang and vLLM servers can be receivers.
Invariant: nothing waits past its deadline. A failed transfer or a dead peer closes the group, which fails the other
side at once, except for a gloo write in progress. The next group needs a new name or port. NCCL is written to the same
rules but was not run: it connects at the first transfer, and a peer that dies then may block for longer.
"""

import contextlib
import itertools
import time
from collections.abc import Container, Iterable, Iterator
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


class _Spec(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def owner(self) -> int: ...


Spec = TypeVar("Spec", bound=_Spec)


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
    is_hosted: bool = False,
) -> BroadcastGroup:
    """Join group `name` at `address:port`, where rank 0 listens, or another process for it (`is_hosted`, see
    `host_group`). Every rank calls this.

    The one that listens returns once the store has counted every rank, others once it has said so: a backend may
    connect late.
    """
    assert 0 <= rank < world_size >= 2, (rank, world_size)
    deadline, hosts = time.monotonic() + timeout_s, rank == 0 and not is_hosted
    with _forming(name, address, port, world_size, timeout_s, f"rank {rank} of {world_size}"):
        if hosts:
            store = _listen(address, port, world_size, timeout_s)
        else:  # half of the time to find the store, because its client retries once more after its own timeout
            half = timedelta(seconds=timeout_s / 2)
            store = TCPStore(address, port, world_size, False, half, wait_for_workers=rank > 0)
        timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
        store.set_timeout(timeout)
        group_store = _of_group(name, store)
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
        if hosts:
            group_store.set(_FORMED, "")
        else:
            group_store.wait([_FORMED], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    return BroadcastGroup(name, rank, world_size, timeout_s, device, transport, store)


def host_group(
    address: str, port: int, world_size: int, name: str, *, num_before: int, timeout_s: float = 120.0
) -> Store:
    """Listen at `address:port` for a group whose rank 0 is another process, until all receivers of it have come, after
    those of `num_before` groups of that size. The group needs the store that this returns."""
    with _forming(name, address, port, world_size, timeout_s, "the host"):
        store = _listen(address, port, (num_before + 1) * world_size, timeout_s)
        _of_group(name, store).set(_FORMED, "")
    return store


def _listen(address: str, port: int, num_ranks: int, timeout_s: float) -> Store:
    """Return when the store of this port has counted so many ranks, over all groups that meet there."""
    return TCPStore(
        address, port, num_ranks, True, timedelta(seconds=timeout_s), wait_for_workers=True, multi_tenant=True
    )


def _of_group(name: str, store: Store) -> Store:
    return PrefixStore(f"{name}/", PrefixStore(name, store))


@contextlib.contextmanager
def _forming(name: str, address: str, port: int, world_size: int, timeout_s: float, who: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(
            f"broadcast group {name!r} must form within {timeout_s:g} s: {who} at {address}:{port} got "
            f"{_first_line(error)}. Check that all {world_size} ranks joined with the same name, address and port."
        ) from error


def senders_of(buckets: Iterable[Iterable[_Spec]]) -> list[int]:
    """Return the ranks of the trainer that send, in the order in which their groups form."""
    return sorted({spec.owner for bucket in buckets for spec in bucket})


def group_of(update: str, sender: int) -> str:
    """Return the name of the group in which a rank of the trainer sends; `update` is the name of all together."""
    return f"{update}/rank-{sender}" if sender else update


def are_of_one_update(*groups: str) -> bool:
    """Tell whether names are those of groups of one `update`."""
    return len({name.partition("/")[0] for name in groups}) == 1


def buckets_without(buckets: Iterable[Iterable[Spec]], left_out: Container[str]) -> list[list[Spec]]:
    """Return the specs, by bucket, of the tensors that are sent if those of these names are not."""
    kept = ([spec for spec in bucket if spec.name not in left_out] for bucket in buckets)
    return [bucket for bucket in kept if bucket]


def send_bucket(group: BroadcastGroup, tensors: Iterable[torch.Tensor], *, timeout_s: float | None = None) -> None:
    """Send the tensors of one bucket, in the order of the specs that the receivers were told."""
    _broadcast([(group, tensor.detach().to(group.device).contiguous()) for tensor in tensors], timeout_s)


def receive_bucket(specs: Iterable[tuple[BroadcastGroup, tuple[Any, ...]]]) -> dict[str, torch.Tensor]:
    """Receive one bucket into fresh tensors, by name, from all its senders at once.

    Each spec begins with name, shape and dtype, as a `ParamSpec`, and comes with the group of its sender. All receivers
    have the same order.
    """
    bucket: dict[str, torch.Tensor] = {}
    parts = []
    for group, (name, shape, dtype, *_) in specs:
        bucket[name] = torch.empty(shape, dtype=DTYPES[dtype], device=group.device)
        parts.append((group, bucket[name]))
    _broadcast(parts, None)
    return bucket


def receive_buckets(
    groups: Iterable[BroadcastGroup], specs: Iterable[tuple[Any, ...]], sizes: Iterable[int]
) -> Iterator[dict[str, torch.Tensor]]:
    """Receive the tensors of `receive_bucket` in buckets of these numbers of tensors, each when it is asked for."""
    left = zip(groups, specs, strict=True)
    for size in sizes:
        yield receive_bucket(itertools.islice(left, size))


def close_group(group: BroadcastGroup) -> None:
    """Leave the group, which fails its peers' transfers at once; our own wait until their deadline. Idempotent."""
    backend, group.backend, group.store = group.backend, None, None
    if backend is not None:
        backend.abort()


def _broadcast(parts: list[tuple[BroadcastGroup, torch.Tensor]], timeout_s: float | None) -> None:
    """Broadcast one after the other (all ranks keep the same order) under one deadline for the whole list.

    They are under way together: a group transfers on threads, or on a stream, of its own.
    """
    if not parts:
        return
    for group, _ in parts:
        if group.backend is None:
            raise ConnectionError(f"broadcast group {group.name!r} must be open: got a closed one. Join a new group.")
    limit_s = parts[0][0].timeout_s if timeout_s is None else timeout_s
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=limit_s)
    deadline = time.monotonic() + limit_s
    works: list[Any] = []
    try:
        for group, tensor in parts:
            works.append(group.backend.broadcast([tensor], options))
        for (group, _), work in zip(parts, works, strict=True):
            if group.device.type == "cuda":
                _poll(work, deadline)
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except RuntimeError as error:
        for one, _ in parts:
            close_group(one)
        raise ConnectionError(
            f"broadcast in {group.name!r} must finish within {limit_s:g} s, all peers alive: "
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
