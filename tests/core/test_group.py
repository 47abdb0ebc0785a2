"""Groups on a real Ray that lose workers or a node: callers get what they would have got, or one error with a cause."""

import contextlib
import functools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray")
import ray
import torch
from cluster.ray_cluster import RayCluster, ray_cluster
from harness.processes import wait_until
from tensordict import TensorDict
from testing_groups import WIDE, Tally, Unreadable

from arealite.api.alloc_mode import ParallelSizes
from arealite.api.cli_args import DPOConfig, load_expr_config
from arealite.api.errors import GroupLostError
from arealite.core import world
from arealite.core.batch import Column, Pieces, RemoteBatch
from arealite.core.group import Task, WorkerGroup
from arealite.core.records import CallRecord
from arealite.core.remote_engine import RemoteEngine
from arealite.core.worker import Call, GroupSpec, Redo
from arealite.core.workers import Workers
from arealite.launcher.place.ray import connect
from arealite.utils import trace
from arealite.utils.distributed import is_agreed
from arealite.utils.packed import pack

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("core_group")]

PATHS = f"{Path(__file__).parents[1]}{os.pathsep}{Path(__file__).parents[2]}"
Start = Callable[..., WorkerGroup]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster("one", "two") as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        connect()
        yield cluster
        ray.shutdown()


@pytest.fixture
def records() -> list[CallRecord]:
    return []


@pytest.fixture
def incidents() -> list[str]:
    return []


@pytest.fixture
def start(cluster: RayCluster, records: list[CallRecord], incidents: list[str], tmp_path: Path) -> Iterator[Start]:
    """Starts groups of Tally engines, which are at the start of step 1."""
    groups = []

    def started(
        name: str = "actor",
        *,
        ranks: int = 2,
        sizes: ParallelSizes | None = None,
        timeout_s: float = 60.0,
        restarts: int = 3,
        gpus: int = 0,
        is_trained: bool = True,
    ) -> WorkerGroup:
        options = {"gpus_per_rank": gpus, "call_timeout_s": timeout_s, "max_restarts": restarts}
        spec = spec_of(name, tmp_path / "logs", sizes=sizes or ParallelSizes(data=ranks), **options)
        group = WorkerGroup(spec, records.append, incidents.append)
        groups.append(group)
        folder = tmp_path / f"strikes-{len(groups)}"
        folder.mkdir()
        group.add(name, functools.partial(Tally, folder, is_trained=is_trained))
        value(group, "initialize", redo="always")
        group.begin_step(1)
        return group

    yield started
    for group in groups:
        group.close()


def spec_of(name: str, logs: Path, **given: Any) -> GroupSpec:
    options = {"cpus": 0, "gpus_per_rank": 0, "call_timeout_s": 60.0, "max_restarts": 3} | given
    options = {"sizes": ParallelSizes()} | options
    options |= {"roles": (name,), "strategy": "STRICT_PACK", "threads": 1, "num_threads": 1, "memory": 0}
    env = {"PYTHONPATH": PATHS, trace.FOLDER_VARIABLE: str(logs.with_name("trace"))}
    return GroupSpec(name, env=env, log_folder=logs, **options)


def submitted(group: WorkerGroup, run: str, *args: Any, redo: Redo = "in_step", **kwargs: Any) -> Task:
    return group.submit(Call(f"{group.spec.name}.{run}", group.spec.name, run, args, kwargs, redo=redo))


def value(group: WorkerGroup, run: str, *args: Any, redo: Redo = "in_step", **kwargs: Any) -> Any:
    return submitted(group, run, *args, redo=redo, **kwargs).values.result(timeout=300)[0].value


def test_what_is_done_again_gives_the_same_bits(
    start: Start, records: list[CallRecord], incidents: list[str], tmp_path: Path
) -> None:
    calm = start("calm")
    expected = []
    for step in range(2, 5):
        expected += [value(calm, "add", 1.5), value(calm, "add", 0.25)]
        calm.begin_step(step)
    records.clear()
    group, found = start(timeout_s=20.0), []
    for step, fault in enumerate(("killed", "hangs", "fails"), 2):
        first, second = submitted(group, "add", 1.5), submitted(group, "add", 0.25, fault=fault)
        wait_until("the second call runs", lambda task=second: task.state.status == "running", 60)  # or does so again
        found += [task.values.result(timeout=300)[0].value for task in (first, second)]
        states = [task.state for task in (first, second)]
        assert [one.status for one in states] == ["replayed", "replayed"] and states[0].end <= states[1].begin
        group.begin_step(step)
    assert found == expected and len(set(found)) == 6
    attempts = [(one.step, one.attempt) for one in records if one.call == "actor.add"]
    assert attempts == [pair for step in (1, 2, 3) for pair in ((step, 1), (step, 2), (step, 2))]
    assert (group.num_respawns, group.num_replayed) == (6, 12)  # the engine is made and initialized again as well
    told = "replays 2 calls of step {}: {}"
    whys = (
        "rank 1 died in actor.add: its worker process has died. Worker exit type: SYSTEM_ERROR",
        "rank 0, 1 did not end actor.add within 20 s",
        "rank 1 failed alone in actor.add with ValueError: a rank fails",
    )
    for number, (text, why) in enumerate(zip(incidents, whys, strict=True), 1):
        assert text.startswith(f"group actor is restarted ({number} of 3 restarts) and ")
        assert told.format(number, why) in text
    parts = [path.read_text().splitlines() for path in (tmp_path / "trace").glob("*.jsonl")]
    assert len(parts) == 2 + 2 * 4, "also of those that were killed"
    traced = Counter(json.loads(line)["name"] for part in parts for line in part)
    assert traced["calm.add"] == 2 * 6 and traced["actor.add"] >= 2 * 6


def test_the_same_error_twice_ends_the_run(start: Start, tmp_path: Path) -> None:
    group = start()
    with pytest.raises(GroupLostError) as raised:
        value(group, "add", 1.0, fault="fails", times=2)
    assert str(raised.value) == (
        "group actor must keep its workers: got rank 1 failed alone in actor.add with ValueError: a rank fails, "
        f"a second time. Look at {tmp_path / 'logs' / 'actor-1.log'}."
    )
    assert isinstance(raised.value.__cause__, ValueError)
    assert "ValueError: a rank fails" in (tmp_path / "logs" / "actor-1.log").read_text()
    with pytest.raises(GroupLostError, match="a second time"):  # not only the call under way
        value(group, "add", 1.0)


def test_what_all_ranks_raise_is_the_callers_error_at_once(start: Start, incidents: list[str]) -> None:
    group = start("alike")
    wrong = Call("alike.wrong", "alike", lambda engine: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        group.submit(wrong).values.result(timeout=300)
    assert is_agreed(raised.value) and (incidents, group.num_respawns) == ([], 0)
    assert value(group, "add", 1.5) == value(start("calm too"), "add", 1.5)


@pytest.mark.parametrize(
    ("make", "why"),
    [(threading.Lock, "must return a value that can be pickled: got lock"), (Unreadable, "invalid literal for int()")],
)
def test_a_result_that_can_not_be_passed_on_is_an_error_of_its_caller(
    start: Start, incidents: list[str], make: Callable[[], Any], why: str
) -> None:
    group = start("odd")
    with pytest.raises((TypeError, ValueError)) as raised:
        group.submit(Call("odd.make", "odd", lambda engine: make())).values.result(timeout=300)
    assert why in str(raised.value) and is_agreed(raised.value) and (incidents, group.num_respawns) == ([], 0)
    assert value(group, "pid") > 0


def test_an_engine_that_can_not_be_made_is_an_error_of_its_caller(start: Start, incidents: list[str]) -> None:
    group = start("made")
    workers: Any = None  # which only batches need
    with pytest.raises(ZeroDivisionError) as raised:
        RemoteEngine(workers, group, "spare", lambda: 1 / 0, None)
    assert raised.value.__notes__[0].startswith("in spare.make on a worker of group made:\n")
    assert is_agreed(raised.value) and (incidents, group.num_respawns) == ([], 0)
    assert value(group, "pid") > 0


def placements() -> int:
    table = ray.util.placement_group_table()
    return sum(one["state"] != "REMOVED" for one in table.values())


def test_a_group_that_can_not_start_gives_back_its_place(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = placements()
    (tmp_path / "file").touch()
    with pytest.raises(GroupLostError, match=r"group none must keep its workers: got starting failed: "):
        WorkerGroup(spec_of("none", tmp_path / "file" / "logs"), print, print)
    monkeypatch.setattr(world, "PLACE_S", 1.0)
    with pytest.raises(GroupLostError, match=r"Ray must place 1 workers of group large with {'CPU': 1000000\.0} each"):
        WorkerGroup(spec_of("large", tmp_path, cpus=1e6), print, print)
    assert placements() == before


def test_a_snapshot_that_is_not_kept_is_a_loss(
    start: Start, incidents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stops the thread that fetches it: nobody else would notice, and calls would be kept for ever."""
    group, get, is_over = start("held"), ray.get, threading.Event()

    def fail(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "arealite-snapshot" and not is_over.is_set():
            is_over.set()
            raise OSError("no room")
        return get(*args, **kwargs)

    before = value(group, "add", 1.0)
    monkeypatch.setattr(ray, "get", fail)
    group.begin_step(2)
    assert is_over.wait(60.0)
    assert value(group, "add", 0.0) == 2 * before
    (text,) = incidents
    assert text.endswith("a rank took no snapshot: no room")


def test_restarts_are_given_back_once_a_checkpoint_is_whole(start: Start, tmp_path: Path) -> None:
    """Not with the part of each engine: what follows may fail."""
    group = start(restarts=1)
    workers: Any = None  # which only batches need
    engine = RemoteEngine(workers, group, "critic", functools.partial(Tally, tmp_path, is_trained=False), None)
    assert value(group, "add", 1.0, fault="killed") > 0
    group.note_checkpoint()
    assert value(group, "add", 1.0, fault="killed", times=3) > 0, "once more"
    assert engine.write_state(str(tmp_path)) == {}
    num_respawns = group.num_respawns
    with pytest.raises(GroupLostError, match=r"rank 1 died in actor.add: .*, after 1 restarts since the last check"):
        value(group, "add", 1.0, fault="killed", times=9)
    assert group.num_respawns == num_respawns


def test_after_an_error_nobody_waits_for_a_call_that_hangs(start: Start, tmp_path: Path) -> None:
    group = start("hung", timeout_s=600.0)
    workers: Any = None  # which only batches need
    engine = RemoteEngine(workers, group, "spare", functools.partial(Tally, tmp_path), None)
    group.submit(Call("hung.add", "hung", "add", (1.0,), {"fault": "hangs"}))
    began = time.monotonic()
    with pytest.raises(KeyError), contextlib.ExitStack() as cleanup:
        cleanup.callback(engine.destroy)
        raise KeyError
    assert time.monotonic() - began < 300  # the call has 600


def test_a_call_that_can_not_be_repeated_fails_for_all_and_later_ones_go_on(start: Start) -> None:
    group = start()
    before = value(group, "add", 1.0)
    with pytest.raises(GroupLostError, match=r"actor.add must not lose its workers: rank 1 died") as raised:
        value(group, "add", 1.0, redo="never", fault="killed")
    assert is_agreed(raised.value)
    os.kill(value(group, "pid"), signal.SIGKILL)  # between calls, which the next one notices
    assert value(group, "add", 0.0, redo="until_done") == 2 * before
    with pytest.raises(GroupLostError, match=r"actor.pid must run on its own workers: they were replaced"):
        group.submit(Call("actor.pid", "actor", "pid", redo="never", life=0)).values.result(timeout=300)


def test_pieces_on_a_node_that_dies_are_made_again(cluster: RayCluster, start: Start, tmp_path: Path) -> None:
    cluster.add("spare")
    maker, user = start("ref", ranks=1, gpus=4, is_trained=False), start("actor", ranks=1, gpus=4)
    ids = TensorDict({"input_ids": torch.arange(2)[:, None], "attention_mask": torch.ones(2, 1, dtype=torch.bool)}, 2)
    pieces = Pieces([ray.put(pack(ids, ids.keys()))])
    batch = RemoteBatch([[0, 1]])
    batch["input_ids"], batch["attention_mask"] = Column(pieces, "input_ids"), Column(pieces, "attention_mask")
    wide = [maker.submit(widening(maker, batch, factor)) for factor in (1.0, 2.0)]
    for one in wide:
        ray.wait(one.pieces.result(), fetch_local=False)
    first = wide[0].pieces.result()[0].hex()
    cluster.kill(cluster.machine_of(psutil.Process(value(maker, "pid"))))
    totals = []
    for one in wide:
        batch["wide"] = Column(one.pieces, "wide")
        call = Call("actor.total", "actor", "total", batch=batch.select(["wide"]))
        totals.append(user.submit(call).values.result(timeout=300)[0].value["total"])
    assert totals == [1.0 * WIDE, 2.0 * WIDE]
    assert wide[0].pieces.result()[0].hex() != first
    assert len(list((tmp_path / "strikes-1").iterdir())) == 4
    assert maker.num_respawns == 1
    assert user.num_respawns in (1, 2), "the second call may be sent before its pieces are there again"


def test_what_is_fetched_has_the_rows_and_the_width_of_the_batch(cluster: RayCluster, tmp_path: Path) -> None:
    """Parts are as wide as their longest row; one of them is as wide as the batch, which is wider than any row."""
    config = tmp_path / "config.yaml"
    config.write_text("experiment_name: e\ntrial_name: t\nworkers: {ref: {ranks: 3}}\nref: {}\n")
    given = ["--config", str(config), f"cluster.fileroot={tmp_path}", "model.path=none", "train_dataset.path=none"]
    workers = Workers(load_expr_config(given, DPOConfig)[0])
    mask = torch.arange(9) < torch.tensor([5, 1, 4, 2, 3])[:, None]
    batch = TensorDict({"attention_mask": mask, "input_ids": torch.randint(1, 99, mask.shape) * mask}, len(mask))
    remote = workers.scatter(batch)
    assert remote.num_parts == 3
    for key, column in batch.items():
        assert torch.equal(workers.fetch(remote[key], remote), column), key


def test_the_ranks_of_a_block_get_the_same_rows_and_store_their_outputs_once(start: Start, tmp_path: Path) -> None:
    """Three parts for two blocks of two ranks: the first block has two of the parts."""
    config = tmp_path / "config.yaml"
    sizes = "workers: {model: {parallel: d2t2}, ref: {ranks: 3}}"
    config.write_text(f"experiment_name: e\ntrial_name: t\n{sizes}\nref: {{}}\n")
    given = ["--config", str(config), f"cluster.fileroot={tmp_path}", "model.path=none", "train_dataset.path=none"]
    workers = Workers(load_expr_config(given, DPOConfig)[0])
    group = start("model", sizes=ParallelSizes(data=2, tensor=2))
    engine = RemoteEngine(workers, group, "model", functools.partial(Tally, tmp_path, is_trained=False), None)
    ids = torch.arange(1, 13).view(6, 2)
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.ones_like(ids)}
    rows |= {"advantages": ids / 4, "group_index": torch.arange(6)}
    remote = workers.scatter(TensorDict(rows, batch_size=[6]))
    task = engine.submit("double", remote, output="doubled")
    seen = [outcome.value for outcome in task.values.result(timeout=300)]
    assert seen[0] == seen[1] and seen[2] == seen[3] and (len(seen[0]), len(seen[2])) == (4, 2)
    assert len(task.pieces.result()) == remote.num_parts == 3
    assert torch.equal(workers.fetch(Column(task.pieces, "doubled"), remote), 2 * ids)
    updates = engine.updates_of(remote)
    assert sorted(group for update in updates for group in update.groups) == [*range(6)]


def widening(group: WorkerGroup, batch: RemoteBatch, factor: float) -> Call:
    seen, kwargs = batch.select(["input_ids"]), {"factor": factor}
    return Call("ref.widen", "ref", "widen", kwargs=kwargs, batch=seen, output="wide")


def test_who_waits_for_pieces_that_nobody_will_make_again_learns_why() -> None:
    """Their call had succeeded, a node died with them, and then the group came to its end."""
    call, piece = Call("actor.infer", "actor", "infer"), ray.ObjectRef.from_random()
    task = Task(call, 1, Pieces(make_again=lambda pieces: None))
    task.succeed([], [piece])
    task.pieces.report_lost(piece.hex())
    task.fail(GroupLostError("the group is lost"))
    assert task.pieces.is_settled()
    with pytest.raises(GroupLostError, match="the group is lost"):
        task.pieces.result()
    assert task.values.result() == []


def test_the_variables_of_workers_may_be_secret_and_are_not_shown(tmp_path: Path) -> None:
    assert PATHS not in repr(spec_of("actor", tmp_path / "logs"))
