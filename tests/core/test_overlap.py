"""Groups on a real Ray run beside each other, keep nothing, and pass on errors. Engines sleep or echo: no model."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from tensordict import TensorDict

from arealite.api.cli_args import PPOConfig, load_expr_config
from arealite.api.run_folder import RunFolder
from arealite.core.graph import MFC, DataFlowGraph
from arealite.core.master import Master
from arealite.core.records import CallLog, CallRecord, read_calls
from arealite.core.workers import Workers

ray = pytest.importorskip("ray")
internal_api = pytest.importorskip("ray._private.internal_api")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("core_overlap")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "arealite" / "configs" / "gsm8k_ppo_cpu.yaml"
TOKENS = ("input_ids", "attention_mask")
ROLES = ("actor", "critic", "ref")
ROWS, LENGTH = 256, 512
BATCH_BYTES = ROWS * LENGTH * 8 * 5  # two keys of the source, and one of each role


class Sleeper:
    """An engine that takes its time and returns the tokens, or fails."""

    model_config = None

    def __init__(self, config: Any) -> None:
        self.config = config

    def initialize(self, addr: None, ft_spec: None) -> None:
        """There is nothing to load."""

    def set_version(self, version: int) -> None:
        """It has no weights."""

    def echo(self, batch: TensorDict, *, seconds: float = 0.0) -> torch.Tensor:
        time.sleep(seconds)
        answer: torch.Tensor = batch["input_ids"] + 1
        return answer

    def fall(self, batch: TensorDict, *, file: str) -> torch.Tensor:
        """Die half-way if a file is there, once."""
        time.sleep(0.5)
        if Path(file).exists():
            Path(file).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.echo(batch, seconds=0.5)

    def keep(self, batch: TensorDict) -> None:
        """Make the ids that a token was sampled from, two for each."""
        batch["kept_counts"] = 2 * batch["attention_mask"].int()
        batch["kept_ids"] = batch["input_ids"].repeat_interleave(2, dim=1)

    def sum_of_kept(self, batch: TensorDict) -> dict[str, float]:
        return {"sum": float(batch["kept_ids"].sum())}

    def fail(self, batch: TensorDict) -> torch.Tensor:
        raise ValueError("the reward must be finite: got nan")

    def train(self, batch: TensorDict) -> dict[str, float]:
        return {"train/sum": float(sum(batch[f"{role}_logprobs"].sum() for role in ROLES))}


def graph(seconds: float) -> DataFlowGraph:
    """Return a step in which all roles infer at once, each for some seconds, and then the actor trains."""
    made = {role: f"{role}_logprobs" for role in ROLES}
    kwargs = {"seconds": seconds}
    calls = [
        MFC("data", "data", "generate", outputs=TOKENS),
        *(MFC(f"{role}_inf", role, "inference", Sleeper.echo, TOKENS, (made[role],), kwargs) for role in ROLES),
        MFC("actor_train", "actor", "train_step", Sleeper.train, (*TOKENS, *made.values())),
    ]
    return DataFlowGraph(calls, dict.fromkeys(ROLES, Sleeper), publishes="actor")


def new_batch(step: int = 0) -> TensorDict:
    ids = torch.full((ROWS, LENGTH), step, dtype=torch.int64)
    return TensorDict({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, batch_size=[ROWS])


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """Return a master whose three roles have a worker each, on a node where `ray start` has left an address."""
    folder = tmp_path_factory.mktemp("overlap")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/tmp") as ray_folder:  # for sockets
        patch.setenv("RAY_TMPDIR", ray_folder)
        (Path(ray_folder) / "ray").mkdir()
        (Path(ray_folder) / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        yield from make_master(folder)


def make_master(folder: Path) -> Iterator[Master]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker finds a module of tests
    given = ["actor.path=none", "ref={}", "workers.ref.ranks=1", "workers.critic.ranks=1", f"cluster.fileroot={folder}"]
    config = load_expr_config(["--config", str(EXAMPLE), *given], PPOConfig)[0]
    with Workers(config) as workers:
        master = Master(config, graph(1.0))
        master.workers = workers
        master.engines = {role: workers.engine(role, Sleeper, None) for role in ROLES}
        for engine in master.engines.values():
            engine.initialize(None, None)
        yield master
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_calls_of_groups_that_need_nothing_of_each_other_run_at_once(
    master: Master, measured: Callable[..., None]
) -> None:
    """All records of the log have a moment in common: how long a loaded machine takes to begin them is no matter."""
    master.workers.take_records()
    master._log = CallLog(RunFolder(master.config).calls)
    metrics = master.run_graph(master.workers.scatter(new_batch(step=1)))
    assert metrics == {"train/sum": ROWS * LENGTH * 2.0 * len(ROLES)}
    metrics = master._measure()
    calls = {one.call: one for one in read_calls(RunFolder(master.config).calls)}
    inferred = [calls[f"{role}_inf"] for role in ROLES]
    assert all(one.seconds >= 1.0 for one in inferred)
    assert max(one.begin for one in inferred) < min(one.end for one in inferred)
    train = calls["actor_train"]
    assert train.begin >= max(one.end for one in inferred)
    busy = max(one.end for one in inferred) - min(one.begin for one in inferred) + train.seconds
    assert metrics["core/overlap"] == pytest.approx(sum(one.seconds for one in calls.values()) / busy)
    assert metrics["core/overlap"] > 1.0
    measured(overlap_of_3_calls=round(metrics["core/overlap"], 3))
    shown = master.progress.calls
    assert {one.call: (one.begin, one.end) for one in shown} == {one.call: span(one) for one in calls.values()}


def test_a_worker_that_dies_while_others_compute_is_replaced_and_they_go_on(master: Master, tmp_path: Path) -> None:
    """The call is done again by its own group alone, and the step has the numbers of a calm one."""
    file, made = tmp_path / "fault", {role: f"{role}_logprobs" for role in ROLES}
    calls = [
        MFC("critic_inf", "critic", "inference", Sleeper.fall, TOKENS, (made["critic"],), {"file": str(file)})
        if call.name == "critic_inf"
        else call
        for call in graph(2.0).calls
    ]
    faulty = Master(master.config, DataFlowGraph(calls, dict.fromkeys(ROLES, Sleeper), publishes="actor"))
    faulty.workers, faulty.engines = master.workers, master.engines
    before = {group.spec.name: group.num_respawns for group in master.workers.groups}
    found = []
    for step in range(2):
        master.workers.take_records()
        file.touch() if step == 1 else None
        found.append(faulty.run_graph(master.workers.scatter(new_batch(step=1))))
    assert found[0] == found[1] == {"train/sum": ROWS * LENGTH * 2.0 * len(ROLES)} and not file.exists()
    records = {one.call: one for one in master.workers.take_records() if one.call in faulty.graph.named}
    assert {name: one.attempt for name, one in records.items()} == {
        name: 1 + (name == "critic_inf") for name in ("actor_inf", "critic_inf", "ref_inf", "actor_train")
    }
    after = {group.spec.name: group.num_respawns - before[group.spec.name] for group in master.workers.groups}
    assert after == {"actor": 0, "critic": 1, "ref": 0}
    assert records["actor_train"].begin >= records["critic_inf"].end


def test_ids_that_a_call_has_made_reach_other_calls_and_the_master(master: Master) -> None:
    batch, actor, critic = master.workers.scatter(new_batch(step=3)), master.engines["actor"], master.engines["critic"]
    actor.call("keep", batch)
    columns = ("kept_ids",)  # what restores them comes along
    assert critic.call("sum_of_kept", batch, keys=columns) == {"sum": 3.0 * 2 * ROWS * LENGTH}
    ids = master.workers.fetch(batch["kept_ids"], batch)
    assert ids.shape == (ROWS, 2 * LENGTH) and (ids == 3).all()


def span(record: CallRecord) -> tuple[float, float]:
    return record.begin, record.end


def test_the_object_store_and_the_master_keep_nothing_of_300_steps(master: Master) -> None:
    quick = Master(master.config, graph(0.0))
    quick.workers, quick.engines = master.workers, master.engines
    for step in range(300):
        batch = master.workers.scatter(new_batch(step))
        quick.run_graph(batch)
        quick.engines["actor"].set_version(step + 1)  # a step is over, and nobody needs its pieces any more
        if step == 20:
            bytes_before, references_before = stored_bytes(), num_references()
    del batch
    wait_until("little in the store", lambda: stored_bytes() <= bytes_before + BATCH_BYTES, 60.0)
    wait_until("few references", lambda: num_references() <= references_before, 60.0)
    assert bytes_before > BATCH_BYTES / 2, "batches lie in the store"


def test_batches_of_a_step_that_never_ends_do_not_fill_the_store(master: Master) -> None:
    """As in a loop that evaluates, and does not train."""
    for step in range(60):
        batch = master.workers.scatter(new_batch(step))
        master.workers.fetch(master.engines["actor"].call("echo", batch, output="more"), batch)
    bound = 40 * BATCH_BYTES / 2  # two keys of the source and one made are 3 of the 5 keys
    wait_until("little in the store", lambda: stored_bytes() <= bound, 60.0)


def stored_bytes() -> int:
    """Return the bytes of the objects in Ray's store."""
    state = ray._private.state.state
    return int(internal_api.get_memory_info_reply(state).store_stats.object_store_bytes_used)


def num_references() -> int:
    """Return how many objects this process refers to."""
    return len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())


@pytest.mark.parametrize("role", ["actor", "critic"], ids=["the same group", "another group"])
def test_the_error_of_a_pending_column_comes_with_the_next_call_that_needs_it(master: Master, role: str) -> None:
    batch = master.workers.scatter(new_batch())
    batch["broken"] = master.engines["actor"].call("fail", batch, output="broken")
    batch["behind"] = master.engines["ref"].call("echo", batch, output="behind")
    with pytest.raises(ValueError, match="the reward must be finite: got nan") as caught:
        master.engines[role].call("train", batch)
    (note,) = caught.value.__notes__
    assert "in actor.fail on a worker of group actor" in note and "in Sleeper.fail: raise ValueError" in note
    sound = master.workers.scatter(new_batch(step=1))
    column = master.engines[role].call("echo", sound, output="more")
    assert (master.workers.fetch(column, sound) == 2).all()
