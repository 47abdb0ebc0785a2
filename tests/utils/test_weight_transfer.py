from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeVar

import pytest
import testing_forks
import torch
import torch.distributed as dist

from arealite.utils.network import hold_port, port_of
from arealite.utils.weight_transfer import (
    BroadcastGroup,
    are_of_one_update,
    close_group,
    group_of,
    host_group,
    join_group,
    receive_bucket,
    send_bucket,
)

T = TypeVar("T")
BIG = 30_000_000
"""Elements of a tensor that no socket buffer takes."""
PATIENCE_S = 120.0
"""For what must happen at once; only a failing test waits so long."""


class Spec(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def join_all(
    pool: ThreadPoolExecutor, world_size: int, name: str = "g", port: int = 0, timeout_s: float = PATIENCE_S
) -> list[BroadcastGroup]:
    """Join with one thread per rank."""
    with hold_port(port=port) as holder:
        futures = [
            pool.submit(join_group, "127.0.0.1", port_of(holder), rank, world_size, name, timeout_s=timeout_s)
            for rank in range(world_size)
        ]
        return [future.result(PATIENCE_S) for future in futures]


def test_groups_of_several_senders_meet_at_one_port_and_transfer_at_once(pool: ThreadPoolExecutor) -> None:
    """Each tensor comes from its own sender, whichever of them is late, and senders that leave end it for all."""
    senders, names = (0, 1, 5), [group_of("u#1", sender) for sender in (0, 1, 5)]
    assert names == ["u#1", "u#1/rank-1", "u#1/rank-5"] and are_of_one_update(*names)
    assert not are_of_one_update("u#1", "u#2/rank-1")

    def receive(rank: int, port: int) -> list[BroadcastGroup]:
        return [join_group("127.0.0.1", port, rank, 3, name, timeout_s=PATIENCE_S) for name in names]

    with hold_port() as holder:
        place = "127.0.0.1", port_of(holder)
    late = {"timeout_s": PATIENCE_S, "is_hosted": True}
    others = [pool.submit(join_group, *place, 0, 3, name, **late) for name in names[1:]]
    receivers = [pool.submit(receive, rank, place[1]) for rank in (1, 2)]
    groups = [join_group(*place, 0, 3, names[0], timeout_s=PATIENCE_S)]
    stores = []
    for num_before, other in enumerate(others, start=1):
        stores.append(host_group(*place, 3, names[num_before], num_before=num_before, timeout_s=PATIENCE_S))
        groups.append(other.result(PATIENCE_S))
    first, second = (one.result(PATIENCE_S) for one in receivers)

    specs = [Spec(str(sender), (BIG // 100,), "float32") for sender in senders]
    receiving = [pool.submit(receive_bucket, [*zip(own, specs)]) for own in (first, second)]
    for sender, group in reversed([*zip(senders, groups)]):
        send_bucket(group, [torch.full((BIG // 100,), float(sender))])
    for future in receiving:
        bucket = future.result(PATIENCE_S)
        assert [bucket[str(sender)].unique().tolist() for sender in senders] == [[0.0], [1.0], [5.0]]

    receiving = [pool.submit(timed, lambda own=own: receive_bucket(zip(own, specs))) for own in (first, second)]
    for group in reversed(groups):  # as a trainer does when one of its ranks has failed
        close_group(group)
    for future in receiving:
        elapsed_s, error = future.result(PATIENCE_S)
        assert isinstance(error, ConnectionError)
        assert elapsed_s < PATIENCE_S / 2, "nobody may wait for a deadline"
    assert [group.backend for group in first] == [None] * 3


def timed(function: Callable[[], T]) -> tuple[float, T | Exception]:
    start = time.monotonic()
    try:
        return 0.0, function()
    except Exception as error:
        return time.monotonic() - start, error


def test_buckets_arrive_exactly_in_every_dtype_at_every_receiver(pool: ThreadPoolExecutor) -> None:
    tensors = {
        "float32": torch.randn(3, 5),
        "bfloat16": torch.randn(7).bfloat16(),
        "float16": torch.randn(2, 2, 2).half(),
        "float64": torch.randn(4, dtype=torch.float64),
    }
    column = torch.arange(12.0).view(3, 4).t()  # not contiguous
    scalar = torch.tensor(2.5, requires_grad=True)
    specs = [Spec(name, tuple(tensor.shape), name) for name, tensor in tensors.items()]
    specs += [Spec("column", (4, 3), "float32"), Spec("scalar", (), "float32")]
    sender, *receivers = join_all(pool, 3)
    for repetition in range(3):
        received = [pool.submit(receive_bucket, [(receiver, spec) for spec in specs]) for receiver in receivers]
        send_bucket(sender, [*(tensor * (repetition + 1) for tensor in tensors.values()), column, scalar])
        for future in received:
            bucket = future.result(PATIENCE_S)
            assert list(bucket) == [spec.name for spec in specs]
            for name, tensor in tensors.items():
                assert torch.equal(bucket[name], tensor * (repetition + 1))
            assert torch.equal(bucket["column"], column) and bucket["scalar"].item() == 2.5
    for group in (sender, *receivers):
        close_group(group)
        close_group(group)


def test_groups_are_rebuilt_under_new_names_also_at_the_same_port(pool: ThreadPoolExecutor) -> None:
    with hold_port() as holder:
        for epoch in range(2):
            sender, receiver = join_all(pool, 2, name=f"g-{epoch}", port=port_of(holder))
            received = pool.submit(receive_bucket, [(receiver, Spec("a", (2,), "float32"))])
            send_bucket(sender, [torch.full((2,), float(epoch))])
            assert received.result(PATIENCE_S)["a"].tolist() == [epoch, epoch]
            close_group(receiver)
            close_group(sender)


@pytest.mark.parametrize("closes", ["receiver", "sender"])
def test_closing_fails_the_other_side_at_once(pool: ThreadPoolExecutor, closes: str) -> None:
    sender, receiver = join_all(pool, 2, timeout_s=10 * PATIENCE_S)
    waiting: Future[tuple[float, object]]
    if closes == "receiver":
        waiting = pool.submit(timed, lambda: send_bucket(sender, [torch.zeros(BIG)]))
    else:
        waiting = pool.submit(timed, lambda: receive_bucket([(receiver, Spec("a", (BIG,), "float32"))]))
    time.sleep(0.2)
    close_group(receiver if closes == "receiver" else sender)
    _, error = waiting.result(PATIENCE_S)
    assert isinstance(error, ConnectionError) and "Join a new group" in str(error)
    close_group(sender)
    close_group(receiver)
    with pytest.raises(ConnectionError, match="must be open"):
        send_bucket(sender, [torch.zeros(1)])


def test_a_silent_peer_costs_no_more_than_the_deadline(pool: ThreadPoolExecutor) -> None:
    sender, receiver = join_all(pool, 2, timeout_s=10 * PATIENCE_S)
    elapsed, error = timed(lambda: send_bucket(sender, [torch.zeros(BIG)], timeout_s=1.0))
    assert isinstance(error, ConnectionError) and "within 1 s" in str(error)
    assert 0.9 < elapsed < PATIENCE_S
    close_group(sender)
    close_group(receiver)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_peer_costs_no_more_than_the_deadline(rank: int) -> None:
    with hold_port() as holder:
        elapsed, error = timed(lambda: join_group("127.0.0.1", port_of(holder), rank, 2, "g", timeout_s=1.0))
    assert isinstance(error, ConnectionError) and f"rank {rank} of 2" in str(error)
    assert elapsed < PATIENCE_S


def test_a_port_in_use_is_an_error() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(ConnectionError, match="must form"):
            join_group("127.0.0.1", listener.getsockname()[1], 0, 2, "g", timeout_s=2.0)


def receive(test: Connection, port: int, size: int) -> None:
    group = join_group("127.0.0.1", port, 1, 2, "g", timeout_s=PATIENCE_S)
    test.send("joined")
    bucket = receive_bucket([(group, Spec("a", (size,), "float32"))])
    test.send(bucket["a"].sum().item())
    close_group(group)


def test_a_receiver_in_another_process_that_is_killed_fails_the_sender() -> None:
    with hold_port() as holder, testing_forks.connected(receive, port_of(holder), BIG) as receiver:
        group = join_group("127.0.0.1", port_of(holder), 0, 2, "g", timeout_s=PATIENCE_S)
        assert receiver.receive() == "joined"
        os.kill(receiver.process.pid, signal.SIGSTOP)  # so that it is in the middle of the transfer
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(timed, lambda: send_bucket(group, [torch.zeros(BIG)], timeout_s=5.0))
            time.sleep(0.3)
            assert not sending.done()
            receiver.process.kill()
            _, error = sending.result(PATIENCE_S)
    assert isinstance(error, ConnectionError)
    close_group(group)


def test_a_sender_inside_a_default_process_group_reaches_a_receiver_outside_of_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # as under torchrun
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with hold_port() as holder, testing_forks.connected(receive, port_of(holder), 4) as receiver:
            group = join_group("127.0.0.1", port_of(holder), 0, 2, "g", timeout_s=PATIENCE_S)
            send_bucket(group, [torch.arange(4.0)])
            assert [receiver.receive(), receiver.receive()] == ["joined", 6.0]
            assert receiver.end() == 0
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 1
        close_group(group)
    finally:
        dist.destroy_process_group()
