"""Joining torch.distributed and reducing plain numbers over it.

The engines of a process share the default process group: the first to join creates it (with one rank, unless started by
torchrun or a launcher) and the last to leave destroys it. A group that existed before is used and left alone.
Invariant: ranks meet only ranks of their own attempt. torchrun keeps its store when it restarts all ranks, so each
attempt has its own keys (see `_sign_in`); the keys of an earlier attempt lead to addresses that are gone.
"""

import functools
import itertools
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from arealite.utils import heartbeat
from arealite.utils.network import LOOPBACK, address_toward, host_ip, interface_of

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

MEETING_TIMEOUT_S = 1800.0  # for the last rank to start: it may still download its data set
NODE_TIMEOUT_S = 30.0
_LOOK_AGAIN_S = 0.02

logger = logging.getLogger("arealite.distributed")

_lock = threading.Lock()
_generations = itertools.count()
_members = 0
_is_ours = False


def join_default_group(timeout_s: float) -> None:
    """Join the default process group until `leave_default_group`; a collective may take `timeout_s`."""
    global _members, _is_ours
    with _lock:
        if not dist.is_initialized():
            with heartbeat.waiting("all ranks to meet", on="ranks"):
                _create_default_group(timedelta(seconds=timeout_s))
            _is_ours = True
        _members += 1


def leave_default_group() -> None:
    """Leave the default process group."""
    global _members, _is_ours
    with _lock:
        _members -= 1
        if _members == 0 and _is_ours:
            dist.destroy_process_group()
            _is_ours = False


def global_rank() -> int:
    """Return the rank of this process, also before it has joined the group."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def is_restarted() -> bool:
    """Return True on rank 0 if torchrun has restarted the trainer; waits for the other ranks."""
    return _meet()[3]


def num_nodes() -> int:
    """Return the number of nodes of the trainer."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return -(-num_ranks // int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))


def meeting_address(toward: str) -> str:
    """Return the address at which the host `toward`, and other nodes of the trainer, reach this rank."""
    if toward not in (LOOPBACK, "localhost"):
        return host_ip(toward)
    return LOOPBACK if num_nodes() == 1 else address_toward(os.environ["MASTER_ADDR"])


def _create_default_group(timeout: timedelta) -> None:
    backend = "gloo"
    if torch.cuda.is_available():
        # SGLang's weight-update group can't be formed otherwise.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    store, rank, world_size, _ = _meet()
    own_keys = PrefixStore(f"arealite-{next(_generations)}", store)
    _choose_interface()
    _watch_nodes(own_keys)
    dist.init_process_group(backend, store=own_keys, rank=rank, world_size=world_size, timeout=timeout)


def _choose_interface() -> None:
    """Make gloo and NCCL use the interface that leads to rank 0, unless the user has chosen one.

    Gloo's default is the interface to which this node's name resolves, which may be loopback or down.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return
    name = interface_of(address_toward(os.environ["MASTER_ADDR"]))
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def _watch_nodes(store: Store) -> None:
    """Watch the other nodes of the trainer: the first rank of each node connects to that of every other node.

    Collectives have no short timeout, as ranks wait for rank 0 to collect rollouts, and gloo may miss that its
    connection was reset. The kernel probes these connections, so a rank that is busy or in a debugger counts as alive.
    """
    num_nodes, node = int(os.environ.get("GROUP_WORLD_SIZE", "1")), int(os.environ.get("GROUP_RANK", "0"))
    if num_nodes == 1 or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    listener = socket.create_server((address_toward(os.environ["MASTER_ADDR"]), 0), backlog=num_nodes)
    address, port = listener.getsockname()
    store.set(f"node/{node}", f"{address} {port} {socket.gethostname()}")
    links: list[socket.socket] = []  # held open, so that the kernel answers

    def accept() -> None:
        while True:
            links.append(listener.accept()[0])

    threading.Thread(target=accept, name="nodes", daemon=True).start()
    for other in {*range(num_nodes)} - {node}:
        where = store.get(f"node/{other}").decode().split()
        threading.Thread(target=_watch_node, args=where, name=f"node-{other}", daemon=True).start()


def _watch_node(address: str, port: str, name: str) -> None:
    """End this process, whose main thread may be stuck in C code, if a node is silent or resets the connection.

    A closed connection is ignored: the launcher or torchrun ends the other ranks when a rank has ended.
    """
    interval_s = int(NODE_TIMEOUT_S / 5)
    try:
        with socket.create_connection((address, int(port)), NODE_TIMEOUT_S) as link:
            link.settimeout(None)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * (NODE_TIMEOUT_S - interval_s)))
            link.recv(1)
    except OSError as error:
        must = "node %s (%s) must answer within %g s: got %s. Check that node and the network, then restart the run."
        logger.critical(must, name, address, NODE_TIMEOUT_S, error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


@functools.cache
def _meet() -> tuple[Store, int, int, bool]:
    """Return the store of this attempt, rank, world size, and on rank 0 True after an earlier attempt.

    Called once per process: a new store would contain the addresses of the last group.
    """
    if "RANK" not in os.environ:
        return HashStore(), 0, 1, False
    store, rank, world_size = next(iter(rendezvous("env://", timeout=timedelta(seconds=MEETING_TIMEOUT_S))))
    if rank == 0:
        name, is_restart = _receive_all(store, world_size)
    else:
        name, is_restart = _sign_in(store, rank), False
    return PrefixStore(name, store), rank, world_size, is_restart


def _sign_in(store: Store, rank: int) -> str:
    """Send rank 0 a random word, which only rank 0 of this attempt can answer; return the name of the attempt."""
    word = uuid.uuid4().hex
    store.set(f"arealite/rank/{rank}", f"{word} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")
    try:
        name = store.get(f"arealite/answer/{word}").decode()
    except RuntimeError as error:
        raise TimeoutError(f"rank 0 must answer within {MEETING_TIMEOUT_S:g} s: got {error}") from error
    store.set(f"{name}/here/{rank}", "")
    return name


def _receive_all(store: Store, world_size: int) -> tuple[str, bool]:
    """Name this attempt and answer all ranks (on rank 0); return the name, and True after an earlier attempt."""
    number = store.add("arealite/attempts", 1)
    name = f"arealite/attempt-{number}"
    restarts = [os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")]
    missing = list(range(1, world_size))
    deadline = time.monotonic() + MEETING_TIMEOUT_S
    while missing:
        for rank in missing:  # the word may be from an earlier attempt: answer until the rank has confirmed
            if store.check([f"arealite/rank/{rank}"]):
                word, count = store.get(f"arealite/rank/{rank}").decode().split()
                store.set(f"arealite/answer/{word}", name)
                restarts.append(count)
        missing = [rank for rank in missing if not store.check([f"{name}/here/{rank}"])]
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"all ranks must come within {MEETING_TIMEOUT_S:g} s: got no word from {missing}")
        time.sleep(_LOOK_AGAIN_S if missing else 0)
    return name, number > 1 or any(count != "0" for count in restarts)


def all_reduce(
    values: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the reduction of `values` over the group, on their device, without changing them."""
    reduced = values.detach().cpu().clone()
    with heartbeat.waiting("a sum over all ranks", on="ranks"):
        dist.all_reduce(reduced, op=op, group=group)
    heartbeat.tick()
    return reduced.to(values.device)


def all_reduce_numbers(
    values: Sequence[float], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> list[float]:
    """Reduce each number over the group, in float64."""
    return all_reduce(torch.tensor(list(values), dtype=torch.float64), op, group).tolist()


def from_rank_0(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's value on every rank (collective; pickled)."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return value if dist.get_rank() == 0 else box[0]


def of_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks in rank order (collective; pickled)."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agreed(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on this rank and return its result; raise on every rank if it failed on any (collective)."""
    try:
        outcome = action()
    except Exception as error:
        raise_on_every_rank(error, group)
        raise
    raise_on_every_rank(None, group)
    return outcome


def on_rank_0(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T | None:
    """Run `action` on rank 0 and return its result there; raise on every rank if it failed (collective)."""
    return agreed(lambda: action() if dist.get_rank() == 0 else None, group)


def raise_on_every_rank(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise this rank's error, or RuntimeError with the first failed rank's text. Every rank calls this."""
    with heartbeat.waiting("the outcome on all ranks", on="ranks"):
        texts = of_all_ranks(None if error is None else f"{type(error).__name__}: {error}", group)
    heartbeat.tick()
    errors = (RuntimeError(f"rank {rank} failed: {text}") for rank, text in enumerate(texts) if text is not None)
    failure = error or next(errors, None)
    if failure is not None:
        raise mark_agreed(failure)


def mark_agreed(error: E) -> E:
    """Mark an error that every rank raises together."""
    vars(error)["is_agreed"] = True
    return error


def is_agreed(error: BaseException | None) -> bool:
    """Return True if every rank raises with this error; after another, the rest may wait for this rank."""
    return getattr(error, "is_agreed", False)
