import os
import queue
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import testing_forks
import torch
import torch.distributed as dist

from arealite.utils import distributed
from arealite.utils.network import address_toward


@pytest.fixture
def group() -> None:
    distributed.join_default_group(60)
    yield
    distributed.leave_default_group()


def test_the_last_engine_out_destroys_the_group() -> None:
    distributed.join_default_group(60)
    distributed.join_default_group(60)
    assert dist.get_world_size() == 1
    distributed.leave_default_group()
    assert dist.is_initialized()
    distributed.leave_default_group()
    assert not dist.is_initialized()


def test_a_group_of_someone_else_is_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    distributed.join_default_group(60)
    distributed.leave_default_group()
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_numbers_keep_their_precision(group: None) -> None:
    assert distributed.all_reduce_numbers([2**53 - 1, 0.1]) == [2**53 - 1, 0.1]


def test_reduction_leaves_its_argument(group: None) -> None:
    values = torch.tensor([1.0, 2.0])
    reduced = distributed.all_reduce(values, dist.ReduceOp.MAX)
    reduced.zero_()
    assert values.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("ranks", "beside", "nodes"), [(None, None, 1), (4, None, 1), (4, 4, 1), (16, 8, 2)])
def test_nodes_are_counted_by_the_ranks_beside_this_one(
    monkeypatch: pytest.MonkeyPatch, ranks: int | None, beside: int | None, nodes: int
) -> None:
    for name, value in (("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", beside)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    assert distributed.num_nodes() == nodes
    expected = "127.0.0.1" if nodes == 1 else address_toward("192.0.2.1")
    assert distributed.meeting_address("localhost") == expected


def test_an_error_of_this_rank_is_raised_as_it_is(group: None) -> None:
    distributed.raise_on_every_rank(None)
    with pytest.raises(KeyError, match="missing"):
        distributed.raise_on_every_rank(KeyError("missing"))


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_meet_at_once(tmp_path: Path) -> None:
    """Also though torchrun's store still has the addresses of the first attempt."""
    torchrun = ["--nproc-per-node", "2", "--max-restarts", "3", "--monitor-interval", "0.2"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--log-dir", str(tmp_path / "logs")]
    program = Path(__file__).with_name("restarted_program.py")
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun, str(program), str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=env, timeout=600, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "result.txt").read_text() == "1 True [2.0]"


def watch_host2(_: Connection, port: str, told: str) -> None:
    with open(told, "w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    distributed._watch_node("127.0.0.1", port, "host2")


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_node_that_resets_its_connection_ends_this_process_and_one_that_closes_it_does_not(
    tmp_path: Path, is_reset: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        with testing_forks.connected(watch_host2, port, str(tmp_path / "told")) as process:
            listener.settimeout(testing_forks.DEADLINE_S)
            link, _ = listener.accept()
            if is_reset:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            link.close()
            status, told = process.end(), (tmp_path / "told").read_text()
    assert status == (1 if is_reset else 0), told
    assert ("node host2 (127.0.0.1) must answer within 30 s: got [Errno 104]" in told) == is_reset


def test_every_node_answers_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes in one process: each is watched by the other, and nothing is sent."""
    store, watched = dist.HashStore(), queue.SimpleQueue[str]()
    monkeypatch.setattr(distributed, "_watch_node", lambda address, port, name: watched.put(f"{address} {port}"))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    threads = []
    for node in ("0", "1"):
        monkeypatch.setenv("GROUP_RANK", node)
        threads.append(threading.Thread(target=distributed._watch_nodes, args=(store,)))
        threads[-1].start()
        store.get(f"node/{node}")
    for thread in threads:
        thread.join(120)
    for _ in threads:
        address, port = watched.get(timeout=120).split()
        with socket.create_connection((address, int(port)), timeout=120) as link:
            link.settimeout(0.2)
            with pytest.raises(TimeoutError):
                link.recv(1)
