"""A run that loses workers in every kind of call, and one that loses its master or its launcher."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray")
import ray
import torch
from cluster.ray_cluster import ray_cluster
from harness.processes import wait_until
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDict
from test_equal_numbers import TRAINING, differences, launch_command, migrated, numbers_of, train, train_in_forks
from testing_faulty_actor import PLACES
from testing_quickstart import write_tiny_model

from arealite.api.errors import GroupLostError
from arealite.api.run_folder import RunFolder
from arealite.core.batch import Share, whole
from arealite.core.records import read_calls
from arealite.core.world import actor_of
from arealite.launcher.place.ray import connect
from arealite.utils.packed import Piece, pack
from arealite.utils.processes import kill_tree, wait_gone

pytestmark = pytest.mark.slow

FAULTS = (  # what befalls whom, at which version of the policy's weights
    "ref-logprobs-0-0-killed",
    "actor-logprobs-1-1-killed",
    "actor-advantages-2-0-killed",
    "actor-update-3-1-killed",
    "actor-upload-4-1-killed",
    "actor-transfer-5-0-killed",  # the servers have half of the weights
    "actor-fingerprint-6-1-killed",  # they have all of them
    "actor-transfer-7-1-killed",  # the other sender
    "actor-save-8-1-killed",
    "actor-update-8-0-fails",
)
STEPS = 9
WAIT_S = 600.0
"""For a run to come to where it is hit, or to its end."""
END_S = 120.0
"""For what is left of a run to end."""


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the places where faults are to be."""
    write_tiny_model(out=tmp_path / "model", corpus=None, seed=1)
    folder = tmp_path / "faults"
    folder.mkdir()
    monkeypatch.setenv(PLACES, str(folder))
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return folder


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what four steps come to whom nothing befalls."""
    folder = tmp_path_factory.mktemp("calm")
    write_tiny_model(out=folder / "model", corpus=None, seed=1)
    return train(folder, "calm", migrated(folder), "gsm8k_grpo", *overrides("total_train_steps=4"))


def faulty(script: Path) -> Path:
    """Let the workers of a script run the engine that faults befall."""
    before, after = "from arealite.engine.ppo.actor import FSDPPPOActor", "from testing_faulty_actor import FaultyActor"
    text = script.read_text()
    assert text.count(before) == 1
    script.write_text(text.replace(before, f"{after} as FSDPPPOActor"))
    return script


def overrides(*more: str) -> list[str]:
    told = ["allocation_mode=lite.d1p1t1+d2p1t1", "actor.kl_ctl=0.01", "ref={}", "workers.ref.ranks=1"]
    return [*told, "workers.restarts=20", *more]


def worker(run: Path, name: str) -> psutil.Process:
    """Return the process of a worker, as its heartbeat names it."""
    (heartbeat,) = (run / "logs" / "progress").glob(f"{name}.*.json")
    return psutil.Process(json.loads(heartbeat.read_text())["pid"])


def assert_nothing_was_lost(run: Path, measured: Callable[..., None]) -> None:
    command = [sys.executable, "-m", "arealite.cli.main", "ledger", str(run), "--json"]
    audit = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    measured(lost=audit["lost"], repeated=audit["repeated"])
    assert audit["adds_up"] and audit["lost"] == 0 and audit["repeated"] == 0


@pytest.mark.long
def test_a_run_that_loses_workers_in_every_call_has_the_numbers_of_a_calm_one(
    tmp_path: Path, faults: Path, measured: Callable[..., None]
) -> None:
    script, told = (
        faulty(migrated(tmp_path)),
        overrides(f"total_train_steps={STEPS}", "saver.freq_steps=2", "recover.freq_steps=3"),
    )
    told.append("rollout.weight_update_senders=2")
    calm = train(tmp_path, "calm", script, "gsm8k_grpo", *told)
    for name in FAULTS:
        (faults / name).touch()
    shaken = train(tmp_path, "shaken", script, "gsm8k_grpo", *told)
    assert list(faults.iterdir()) == []
    assert differences(calm, shaken) == []
    assert_nothing_was_lost(tmp_path / "core" / "shaken", measured)
    logs = tmp_path / "core" / "shaken" / "logs"
    incidents = [line for line in (logs / "trainer-0.log").read_text().splitlines() if " is restarted (" in line]
    measured(lost_groups=len(incidents), equal_versions=shaken["weights"].count("\n"))
    assert len(incidents) == len(FAULTS)


@pytest.mark.long
def test_a_graph_that_loses_its_critic_has_the_numbers_of_a_calm_one(
    tmp_path: Path, faults: Path, measured: Callable[..., None]
) -> None:
    """Its worker dies before it has the values of step 1, and with new weights that nobody knows of in step 2."""
    before = "from arealite.core.experiments import ppo\n"
    after = "from testing_faulty_actor import FaultyCritic\n\nfrom arealite.core import experiments\n"
    text = (TRAINING / "main_sync_ppo.py").read_text()
    assert text.count(before) == 1
    script = tmp_path / "main_faulty_ppo.py"
    script.write_text(text.replace(before, f"{after}{before}\nexperiments.FSDPPPOCritic = FaultyCritic\n"))
    told = ["allocation_mode=d1p1t1", "workers.critic.ranks=1", "total_train_steps=3"]
    told += ["valid_dataset=null", "evaluator.freq_steps=null"]
    environment = {name: os.environ[name] for name in (PLACES, "PYTHONPATH")}
    calm = train_in_forks(tmp_path, "calm", script, "gsm8k_ppo", *told, **environment)
    for name in ("critic-values-3-0-killed", "critic-update-7-0-killed"):  # two minibatches per batch
        (faults / name).touch()
    shaken = train_in_forks(tmp_path, "shaken", script, "gsm8k_ppo", *told, **environment)
    assert list(faults.iterdir()) == [] and differences(calm, shaken) == []
    run = tmp_path / "core" / "shaken"
    assert_nothing_was_lost(run, measured)
    again = {(one.step, one.call) for one in read_calls(run / "calls.jsonl") if one.attempt > 1 and "." not in one.call}
    assert {(2, "critic_inf"), (2, "critic_train")} <= again
    assert "of 3 restarts) and replays" in (run / "graph.html").read_text()
    measured(lost_groups=2, equal_versions=shaken["weights"].count("\n"))


@pytest.mark.long
@pytest.mark.xdist_group("core_faults")
def test_a_node_of_a_cluster_is_lost(
    tmp_path: Path, faults: Path, calm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, measured: Callable[..., None]
) -> None:
    """The policy's workers come back on another node; the run is started by one that is no part of the cluster."""
    script, told = faulty(migrated(tmp_path)), overrides("total_train_steps=4", "workers.actor.strategy=STRICT_PACK")
    (faults / "actor-update-2-0-hangs").touch()
    with ray_cluster("one", "two") as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with ThreadPoolExecutor(1) as threads:
            training = threads.submit(train, tmp_path, "shaken", script, "gsm8k_grpo", *told)
            wait_until("an update that hangs", lambda: training.done() or not list(faults.iterdir()), WAIT_S)
            cluster.kill(cluster.machine_of(worker(tmp_path / "core" / "shaken", "actor-0")))
            shaken = training.result()
    assert differences(calm, shaken) == []
    assert_nothing_was_lost(tmp_path / "core" / "shaken", measured)
    measured(lost_nodes=1, equal_versions=shaken["weights"].count("\n"))


class Keeper:
    """Makes rows as a rollout worker does, and reads them as a rank does."""

    async def make(self) -> tuple[int, Piece]:
        return 1, pack(TensorDict({"attention_mask": torch.ones(3, 99_999).bool()}, batch_size=[3]), ["attention_mask"])

    async def read(self, share: Share) -> int:
        return whole(share)["attention_mask"].values.size


def test_rows_outlive_their_worker_and_the_loss_of_their_node_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ray_cluster("one", "two") as cluster, contextlib.ExitStack() as stack:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        connect()
        stack.callback(ray.shutdown)
        nodes = {node["NodeName"]: node["NodeID"] for node in ray.nodes()}
        places = [NodeAffinitySchedulingStrategy(nodes[name], soft=False) for name in ("one", "two")]
        env = {"PYTHONPATH": os.pathsep.join(sys.path)}
        reader, keeper = (actor_of(Keeper, env, num_cpus=0, scheduling_strategy=place).remote() for place in places)
        head, shares = pack(TensorDict({"attention_mask": torch.ones(0, 9)}, batch_size=[0]), ["attention_mask"]), []
        for _ in range(2):
            made, rows = keeper.make.options(num_returns=2).remote()
            assert ray.get(made) == 1
            shares.append(Share(head, [rows]))
        ray.kill(keeper)
        assert ray.get(reader.read.remote(shares[0]), timeout=WAIT_S) == 3 * 9
        cluster.kill("two")
        with pytest.raises(GroupLostError, match="a loss of a node"):
            ray.get(reader.read.remote(shares[1]), timeout=WAIT_S)


def kill(victim: str, command: list[str], *, output: Path, once: Callable[[], bool]) -> None:
    """Start a run, kill its master or its launcher once something has happened, and see that nothing is left of it."""
    with output.open("wb") as file:
        launcher = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        wait_until("what the killing waits for", lambda: launcher.poll() is not None or once(), WAIT_S)
        processes = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
        needed = {"raylet", "gcs_server", "ray::Worker"}
        assert all(any(name in name_of(one) for one in processes) for name in needed), output.read_text()
        (master,) = [one for one in processes if is_victim(one, "master", command[3])]
        (master if victim == "master" else processes[0]).kill()
        assert wait_gone([one.pid for one in processes if one.pid != launcher.pid], END_S) == set()
        assert launcher.wait(END_S) != 0
    finally:
        kill_tree(launcher.pid)


@pytest.mark.xdist_group("core_faults")
def test_a_master_is_killed_while_it_writes_a_checkpoint(
    tmp_path: Path, faults: Path, calm: dict[str, Any], measured: Callable[..., None]
) -> None:
    """The shards of step 1 are on the disk by then, and step 2 is under way; the run resumes after step 0."""
    script, run = faulty(migrated(tmp_path)), tmp_path / "core" / "killed"
    told = overrides("total_train_steps=4", "recover.freq_steps=1", "recover.retries=0")
    (faults / "actor-write-2-0-hangs").touch()
    command = launch_command(tmp_path, "killed", script, "gsm8k_grpo", *told)
    kill("master", command, output=tmp_path / "output.txt", once=lambda: not list(faults.iterdir()))
    unfinished = run / "recover" / ".step_1.unfinished"
    assert [*unfinished.glob("actor/*.distcp")] and not [*unfinished.glob("*.json")]
    assert [path.name for path in (run / "recover").glob("step_*")] == ["step_0"]
    resumed = train(tmp_path, "killed", script, "gsm8k_grpo", *told)
    assert "resuming after step 0 from" in (run / "logs" / "trainer-0.log").read_text()
    assert differences(calm, resumed) == [] and not unfinished.exists()
    assert_nothing_was_lost(run, measured)
    measured(lost_masters=1)


@pytest.mark.long
@pytest.mark.xdist_group("core_faults")
def test_a_run_goes_on_after_its_master_was_killed_and_then_the_head_of_its_ray(
    tmp_path: Path, faults: Path, calm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, measured: Callable[..., None]
) -> None:
    """One launcher starts it again each time, from the newest checkpoint, and in the end nothing is left of it."""
    script, told = faulty(migrated(tmp_path)), overrides("total_train_steps=4", "recover.freq_steps=1")
    command = launch_command(tmp_path, "killed", script, "gsm8k_grpo", *told, "recover.retries=1")
    run, output = tmp_path / "core" / "killed", tmp_path / "output.txt"
    # Else calls would go on for a minute, as Ray waits for another head. By then the checkpoint of step 1 is whole.
    hang = faults / "actor-update-3-0-hangs"
    hang.touch()
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
    with tempfile.TemporaryDirectory(dir="/tmp") as ray_folder, output.open("wb") as file:
        monkeypatch.setenv("RAY_TMPDIR", ray_folder)
        shared = shared_memory()
        launcher = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            seen, victims = set[int](), []
            for victim, is_time in (("master", lambda: newest(run) >= 0), ("gcs_server", lambda: not hang.exists())):
                wait_until("the time to kill", lambda: launcher.poll() is not None or is_time(), WAIT_S)  # noqa: B023
                processes = psutil.Process(launcher.pid).children(recursive=True)
                seen |= {one.pid for one in processes}
                victims += [one for one in processes if is_victim(one, victim, command[3])]
                victims[-1].kill()
            assert launcher.wait(WAIT_S) == 0, output.read_text()
            assert len(victims) == 2 and wait_gone([*seen], END_S) == set()
            assert [*Path(ray_folder).iterdir()] == [] and shared_memory() <= shared
        finally:
            kill_tree(launcher.pid)
    assert output.read_text().count("restart 1 of 1, because trainer-0 ") == 2
    assert differences(calm, numbers_of(run)) == []
    assert_nothing_was_lost(run, measured)
    measured(lost_masters=1, lost_heads=1)


def shared_memory() -> set[Path]:
    """Return what Ray has in the memory that processes share."""
    return {path for path in Path("/dev/shm").iterdir() if "ray" in path.name or "plasma" in path.name}


def newest(run: Path) -> int:
    """Return the step of the newest whole checkpoint, -1 before the first one."""
    return RunFolder(run).newest_checkpoint


def is_victim(process: psutil.Process, victim: str, script: str) -> bool:
    """Tell whether a process is the master of a script, or the server of its Ray."""
    with contextlib.suppress(psutil.NoSuchProcess):  # a helper may have ended meanwhile
        return process.cmdline()[1:2] == [script] if victim == "master" else process.name() == victim
    return False


def name_of(process: psutil.Process) -> str:
    """Return the name of a process, which may have ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def test_nothing_is_left_of_a_run_whose_launcher_is_killed(tmp_path: Path, faults: Path) -> None:
    told = overrides("total_train_steps=50", "recover.retries=0")
    command = launch_command(tmp_path, "killed", migrated(tmp_path), "gsm8k_grpo", *told)
    metrics = tmp_path / "core" / "killed" / "metrics.jsonl"
    has_begun = lambda: metrics.exists() and bool(metrics.read_text())  # noqa: E731
    kill("launcher", command, output=tmp_path / "output.txt", once=has_begun)
