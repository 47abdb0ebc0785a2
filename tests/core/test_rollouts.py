"""Episodes on workers of a real Ray, against real servers in threads: as in one process, whatever dies."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from harness.processes import wait_until
from tensordict import TensorDict
from testing_client import in_loop
from testing_rollouts import stored_rows
from testing_server import ScriptedServer, serve
from testing_workflows import SamplingWorkflow

pytest.importorskip("ray")
from arealite.api.cli_args import InferenceEngineConfig, PPOConfig, load_expr_config
from arealite.api.errors import EpisodeError, GroupLostError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core import rollouts
from arealite.core.rollouts import RolloutWorkers
from arealite.core.workers import Workers
from arealite.dataset.loader import PromptLoader
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.rollout.account.audit import audit
from arealite.utils.packed import Piece, unpack

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("core_rollouts")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "arealite" / "configs" / "gsm8k_ppo_cpu.yaml"
WAIT_S = 120.0
Connect = Callable[..., tuple[RemoteInferenceEngine, RolloutWorkers | None]]


class FailingWorkflow(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        raise OSError("the disk is full")


class BlockingWorkflow(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        threading.Event().wait(600)
        raise AssertionError("nobody waits for so long")


class MoodyWorkflow(SamplingWorkflow):
    """Adds a column that only this process has, and notes that it was closed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(n_samples=2, max_new_tokens=6)
        self._folder = folder

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict | None:
        trajectory = await super().arun_episode(engine, data)
        if trajectory is not None:
            trajectory[f"mood_of_{os.getpid()}"] = trajectory["rewards"]
        return trajectory

    def close(self) -> None:
        (self._folder / f"closed-{os.getpid()}").touch()


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    given = [f"cluster.fileroot={tmp_path_factory.mktemp('workers')}", "actor.path=none", "workers.rollout.num=2"]
    config = load_expr_config(["--config", str(EXAMPLE), *given], PPOConfig)[0]
    with Workers(config, is_declared=True) as workers:
        yield workers


@pytest.fixture
def connect(workers: Workers, tmp_path: Path) -> Iterator[Connect]:
    """Start servers and an engine, whose episodes run on `num` workers unless `is_here`."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:

        def connected(
            server: ScriptedServer,
            make: Callable[[], RolloutWorkflow],
            name: str = "t",
            is_here: bool = False,
            num: int = 2,
            **more: Any,
        ) -> tuple[RemoteInferenceEngine, RolloutWorkers | None]:
            stack.enter_context(serve(server))
            names = {"fileroot": str(tmp_path), "experiment_name": "e", "trial_name": name}
            config = InferenceEngineConfig(server_addrs=[server.address], consumer_batch_size=4, **names, **more)
            assert workers._config.rollout is not None
            workers._config.rollout, workers._limits.rollout.num = config, num
            clients = None if is_here else workers.rollouts(make, None)
            engine = RemoteInferenceEngine(config, hand_out=functools.partial(whole, workers), clients=clients)
            engine.initialize(None, None)
            stack.callback(clients.close if clients else lambda: None)
            stack.callback(engine.destroy)
            return engine, clients

        yield connected


def loader() -> PromptLoader:
    return PromptLoader([{"input_ids": [5, 6, 7 + row]} for row in range(100)], 4, seed=1)


def whole(workers: Workers, trajectories: list[TensorDict]) -> TensorDict:
    """Return the batch of trajectories as a rank gets it, from where rollout workers put them."""
    remote = workers.scatter(trajectories)
    rows = {key: workers.fetch(column, remote) for key, column in remote.items()}
    return TensorDict(rows, batch_size=[len(rows["rewards"])])


SAMPLING = functools.partial(SamplingWorkflow, n_samples=2, max_new_tokens=6)


def kill_a_worker() -> None:
    next(one for one in psutil.Process().children(recursive=True) if "ray::RolloutWorker" in one.name()).kill()


def rows_of(folder: Path, step: int) -> list[dict[str, Any]]:
    return [row | {"server": ""} for row in stored_rows(folder / "rollouts" / f"step_{step}")]


def test_batches_and_files_are_those_of_one_process(connect: Connect, tmp_path: Path) -> None:
    batches = []
    for name in ("here", "there"):
        engine, clients = connect(ScriptedServer(), SAMPLING, name, is_here=name == "here")
        batches.append([engine.prepare_batch(loader(), SAMPLING())])
        metrics = engine.metrics()
        assert metrics["rollout/generated_tokens"] == 4 * 2 * 6 and metrics["rollout/accepted"] == 4
        assert metrics["reward/sampled_mean"] == pytest.approx(float(batches[-1][0]["rewards"].mean()))
        engine.state_dict()
        assert (clients is None) == (name == "here")
    (here,), (there,) = batches
    assert set(here.keys()) == set(there.keys())
    assert {key: here[key].tolist() for key in set(here.keys())} == {
        key: there[key].tolist() for key in set(there.keys())
    }
    assert all(here[key].dtype == there[key].dtype for key in set(here.keys()))
    assert rows_of(tmp_path / "e" / "here", 0) == rows_of(tmp_path / "e" / "there", 0)


@pytest.mark.parametrize("is_one_lost", [False, True])
def test_an_update_of_weights_holds_the_requests_of_every_worker(
    connect: Connect, tmp_path: Path, is_one_lost: bool
) -> None:
    """The server tells no versions, so a request that any worker sent too early would bear the wrong one."""
    server = ScriptedServer(holds_at=6, tells="nothing")
    engine, clients = connect(server, SAMPLING, max_head_offpolicyness=1)
    assert clients is not None
    batches: list[TensorDict] = []
    taking = threading.Thread(target=lambda: batches.append(engine.prepare_batch(loader(), SAMPLING())), daemon=True)
    taking.start()
    server.wait_until_held(8)
    if is_one_lost:
        kill_a_worker()
    engine.pause()
    meta = WeightUpdateMeta("disk", path=str(tmp_path / "w"), version=1, timeout_s=60.0, holds_requests=True)
    updating = engine.update_weights(meta)
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "weights").write_text("1")
    meta.transfer.uploaded.set_result(None)
    updating.result(60)
    num_requests = len(server.requests)
    wait_until("two workers", lambda: len(clients._ready()) == 2, WAIT_S)
    server.holds_at = None
    engine.run(engine.receiver.admit())
    assert len(server.requests) == num_requests, "nothing is sent before the release"
    engine.set_version(1)
    engine.resume()
    taking.join(60)
    versions = batches[0]["versions"][batches[0]["loss_mask"].bool()]
    assert set(versions.tolist()) <= {0, 1} and int(versions.max()) == 1
    # The logprob of the scripted server is lower by the version that sampled it.
    told = -batches[0]["logprobs"][batches[0]["loss_mask"].bool()]
    assert torch.equal(told.floor().long(), versions)


def test_the_episodes_of_a_worker_that_dies_are_issued_again(
    connect: Connect, workers: Workers, tmp_path: Path
) -> None:
    server = ScriptedServer(holds_at=6)
    engine, clients = connect(server, SAMPLING, max_head_offpolicyness=1)
    assert clients is not None
    batches: list[TensorDict] = []

    def train() -> None:
        for version in range(3):
            batches.append(engine.prepare_batch(data, SAMPLING()))
            server.version = version + 1
            engine.set_version(server.version)

    data, training = loader(), threading.Thread(target=train, daemon=True)
    training.start()
    server.wait_until_held(8)
    kill_a_worker()
    server.holds_at = None
    training.join(120)
    assert len(batches) == 3
    totals = engine._require_executor().stats
    assert totals.rejected == 0 and engine.metrics()["rollout/retried_worker_lost"] >= 1
    assert "rollout/failed_worker_lost" not in engine.metrics()
    assert "is lost with" in workers.incidents[-1].text
    engine.state_dict()
    found = audit(tmp_path / "e" / "t")
    assert (found.trained, found.lost, found.repeated) == (12, 0, 0)


def test_the_master_gets_no_tokens_and_a_worker_that_dies_loses_no_rows(
    connect: Connect, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it unpacks of an episode is as large for 4,000 tokens as for 6; a worker writes the rollout file."""
    sizes: dict[int, list[int]] = {}
    for num_tokens in (6, 4000):
        seen = sizes[num_tokens] = []

        def noted(piece: Piece, seen: list[int] = seen) -> TensorDict:
            seen.append(sum(array.values.nbytes for array in piece.values()))
            return unpack(piece)

        make = functools.partial(SamplingWorkflow, n_samples=4, max_new_tokens=num_tokens)
        engine, clients = connect(ScriptedServer(), make, str(num_tokens))
        assert clients is not None
        with monkeypatch.context() as patch:
            patch.setattr(rollouts, "unpack", noted)
            patch.setattr(engine, "_hand_out", list)
            records: Any = engine.prepare_batch(loader(), make())
            patch.setattr(rollouts, "write_batch", None)
            engine.state_dict()
        assert all(value.numel() <= 4 for record in records for value in record.values())
        assert [record.num_tokens for record in records] == [4 * (3 + num_tokens)] * 4
        rows = stored_rows(tmp_path / "e" / str(num_tokens) / "rollouts" / "step_0")
        kill_a_worker()
        batch = whole(workers, records)
        assert batch["loss_mask"].sum(1).tolist() == [num_tokens] * 16
        assert [row["input_ids"] for row in rows] == batch["input_ids"].tolist()
    assert len(sizes[6]) >= 4 and set(sizes[6]) == set(sizes[4000])


@pytest.mark.parametrize("max_failed_share", [0.1, 1.0])
def test_an_error_of_a_workflow_reaches_the_master_with_its_line(connect: Connect, max_failed_share: float) -> None:
    """Also if any number may fail: a batch that never fills is not waited for."""
    engine, _ = connect(ScriptedServer(), FailingWorkflow, num=1, episode_retries=0, max_failed_share=max_failed_share)
    with pytest.raises(EpisodeError) as raised:
        engine.prepare_batch(loader(), FailingWorkflow())
    assert "the disk is full" in str(raised.value) and 'raise OSError("the disk is full")' in str(raised.value)


def test_columns_are_those_of_the_first_trajectory_of_all_workers(connect: Connect, tmp_path: Path) -> None:
    make = functools.partial(MoodyWorkflow, tmp_path)
    engine, clients = connect(ScriptedServer(), make, episode_retries=0)
    assert clients is not None
    with contextlib.suppress(EpisodeError):  # if those of the other worker have spent the budget
        engine.prepare_batch(loader(), make())
    assert engine.metrics()["rollout/failed_trajectory"] >= 1
    engine.destroy()
    clients.close()
    assert len(list(tmp_path.glob("closed-*"))) == 2


def test_what_a_worker_learns_of_servers_reaches_the_master(connect: Connect) -> None:
    """A server that has started anew, with older weights, gets the newest while the trainer waits."""
    server = ScriptedServer(version=1)
    engine, clients = connect(server, SAMPLING)
    assert clients is not None
    engine.set_version(1)
    in_loop(engine, lambda: engine.servers.advance(engine.servers.servers, 1))
    engine.resume()  # every worker has seen it then
    seen, data = [], loader()

    def catch_up() -> None:
        executor = engine._require_executor()
        is_waiting = lambda: all(one.num_waiting_for_servers for one in list(executor._running))  # noqa: E731
        wait_until("a server is waited for", is_waiting, WAIT_S)
        seen.append([one.address for one in engine.servers.joining])
        server.version = 1
        in_loop(engine, lambda: engine.servers.advance(engine.servers.joining, 1))

    engine.published = types.SimpleNamespace(update_joining=catch_up)
    server.version = 0
    batch = engine.prepare_batch(data, SAMPLING())
    assert seen == [[server.address]]
    assert set(batch["versions"][batch["loss_mask"].bool()].tolist()) == {1}

    clients._spec = dataclasses.replace(clients._spec, max_restarts=0)
    server.holds_at = 0
    kill_a_worker()
    engine.set_version(2)
    with pytest.raises(RuntimeError, match="rollout workers must not be lost") as raised:
        engine.prepare_batch(data, SAMPLING())
    assert isinstance(raised.value.__cause__, GroupLostError)


def test_a_call_that_blocks_a_worker_ends_the_run_and_is_named(connect: Connect) -> None:
    engine, _ = connect(ScriptedServer(), BlockingWorkflow, num=1, episode_timeout=2.0)
    with pytest.raises(RuntimeError, match=r"BlockingWorkflow\.arun_episode blocks it"):
        engine.prepare_batch(loader(), BlockingWorkflow())


def test_a_workflow_that_can_not_be_made_ends_the_run_at_once(connect: Connect, workers: Workers) -> None:
    num_incidents = len(workers.incidents)
    with pytest.raises(ValueError, match="no_such"):
        connect(ScriptedServer(), functools.partial(SamplingWorkflow, no_such=1), num=1)
    assert len(workers.incidents) == num_incidents
