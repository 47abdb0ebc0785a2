"""Slots on a real Ray cluster: jobs get what they were promised, and none outlives anything that keeps it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from testing_processes import spawn

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.config.run import load_run_config
from arealite.launcher.place.base import Job, NodeLostError, Slot
from arealite.launcher.plan.plan import Placement, Plan
from arealite.utils.processes import exit_status, kill_tree, wait_gone

pytest.importorskip("ray")
import ray
from cluster.ray_cluster import GPUS, RayCluster, ray_cluster

from arealite.launcher.place.ray import RayPlace, connect

pytestmark = pytest.mark.slow

SERVER = Placement("server-0", "server", 0, (0,), 0)
RANK = Placement("trainer-0", "trainer", 1, (0, 1), 0)
PLAN = Plan(2, 4, (SERVER, RANK))
CONFIG = Path(__file__).parents[3] / "examples" / "arealite" / "configs" / "gsm8k_grpo.yaml"
NODE_TIMEOUT_S = 15.0
END_S = 120.0

NOTE_PIDS = """
import json, os, subprocess, sys, time
daemon = "import os, sys, time; print(os.getpid(), flush=True); os.setsid(); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", daemon], stdout=subprocess.PIPE)
print(json.dumps([os.getpid(), int(child.stdout.readline())]), flush=True)
time.sleep(600)
"""
LAUNCHER = """
import asyncio, os, sys, time
from test_ray import NOTE_PIDS, PLAN, SERVER, Heard, config
from arealite.launcher.place.base import Job
from arealite.launcher.place.ray import RayPlace, connect
async def main():
    connect()
    place = RayPlace()
    place.open(config(), PLAN, print)
    (slot,) = await place.take([SERVER])
    heard = Heard()
    running = asyncio.create_task(slot.run(Job("job", [sys.executable, "-c", NOTE_PIDS], {}), heard))
    while not heard.text:
        await asyncio.sleep(0.1)
    print(heard.text, end="", flush=True)
    await running
asyncio.run(main())
"""


class Heard:
    """Listens to a job."""

    def __init__(self) -> None:
        self.text = ""

    def __call__(self, data: bytes) -> None:
        self.text += data.decode()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster("one", "two") as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("SOMETHING_ELSE", "1")
        connect()
        yield cluster
        ray.shutdown()


def config(*, setup_timeout_s: float = 60) -> BaseExperimentConfig:
    timeouts = [f"launcher.node_timeout={NODE_TIMEOUT_S}", f"rollout.setup_timeout={setup_timeout_s}"]
    return load_run_config(["--config", str(CONFIG), *timeouts])


@contextlib.asynccontextmanager
async def place(plan: Plan = PLAN, *, setup_timeout_s: float = 60) -> AsyncIterator[RayPlace]:
    opened = RayPlace()
    opened.open(config(setup_timeout_s=setup_timeout_s), plan, print)
    try:
        yield opened
    finally:
        await opened.close()


async def running(slot: Slot) -> tuple[asyncio.Task[int], list[int]]:
    """Run a job that has left a daemon behind, and return the pids of both."""
    heard = Heard()
    task = asyncio.create_task(slot.run(Job("job", [sys.executable, "-c", NOTE_PIDS], {}), heard))
    async with asyncio.timeout(120):
        while not heard.text:
            await asyncio.sleep(0.05)
    return task, json.loads(heard.text)


async def noted_pids(path: Path) -> list[int]:
    async with asyncio.timeout(120):
        while not (lines := path.read_text().splitlines()) or not lines[-1].startswith("["):
            await asyncio.sleep(0.1)
    return json.loads(lines[-1])


async def gone(pids: list[int]) -> bool:
    return not await asyncio.to_thread(wait_gone, pids, END_S)


async def test_a_job_gets_its_gpus_and_the_launchers_variables(cluster: RayCluster) -> None:
    names = ["CUDA_VISIBLE_DEVICES", "WANDB_MODE", "SOMETHING_ELSE", "MINE", "PWD"]
    code = f"import json, os; print(json.dumps([os.environ.get(name) for name in {names}] + [os.getcwd()]))"
    async with place() as opened:
        slots = await opened.take([RANK, SERVER])
        assert {slot.node for slot in slots} == {"one", "two"}
        assert {slot.address for slot in slots} == {ray.util.get_node_ip_address()}
        numbers = []
        for slot in slots:
            heard = Heard()
            assert await slot.run(Job("job", [sys.executable, "-c", code], {"MINE": "2"}), heard) == 0
            gpus, *others, folder = json.loads(heard.text)
            numbers.append(len(gpus.split(",")))
            assert (others[:3], folder) == (["offline", None, "2"], os.getcwd())
            await slot.close()
        assert numbers == [2, 1]


async def test_a_job_ends_by_sigterm_and_its_seat_is_free_again(cluster: RayCluster) -> None:
    async with place() as opened:
        for _ in range(2):
            (slot,) = await opened.take([SERVER])
            task, pids = await running(slot)
            slot.terminate()
            assert await task == exit_status(-signal.SIGTERM)
            await slot.close()
            assert await gone(pids)


@pytest.mark.parametrize("victim", ["actor", "relay", "guard"])
async def test_the_end_of_a_keeper_ends_the_job(cluster: RayCluster, victim: str) -> None:
    async with place() as opened:
        (slot,) = await opened.take([SERVER])
        task, pids = await running(slot)
        keepers = psutil.Process(pids[0]).parents()
        started = time.monotonic()
        keepers[["guard", "relay", "actor"].index(victim)].kill()
        if victim == "guard":
            assert await task == exit_status(-signal.SIGKILL)
        else:
            with pytest.raises(NodeLostError, match=slot.node):
                await task
        assert time.monotonic() - started < NODE_TIMEOUT_S
        await slot.close()
        assert await gone(pids)


async def test_a_job_on_a_lost_node_ends_and_gets_another_node(cluster: RayCluster) -> None:
    """Only Ray's process is killed: what it had started must go as well."""
    async with place() as opened:
        (slot,) = await opened.take([RANK])
        task, pids = await running(slot)
        started = time.monotonic()
        cluster.raylet(slot.node).kill()
        with pytest.raises(NodeLostError, match=slot.node):
            await task
        assert time.monotonic() - started < NODE_TIMEOUT_S
        await slot.close()
        assert await gone(pids)
        (other,) = await opened.take([RANK])
        assert other.node != slot.node
        await other.close()
    cluster.kill(slot.node)
    cluster.add(slot.node)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_no_job_outlives_its_launcher(cluster: RayCluster, number: int, tmp_path: Path) -> None:
    """A launcher that hangs, or is cut off, counts as dead for the nodes after `node_timeout`."""
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": f"{here.parents[2]}:{here.parents[1]}:{here.parent}:{here}"}
    with (tmp_path / "output").open("wb") as output:
        launcher = spawn([sys.executable, "-c", LAUNCHER], env=env, stdout=output, stderr=output)
    try:
        pids = await noted_pids(tmp_path / "output")
        os.kill(launcher.pid, number)
        assert await gone(pids)
    finally:
        kill_tree(launcher.pid)
        launcher.wait(120)


async def test_what_does_not_fit_is_waited_for(cluster: RayCluster) -> None:
    big = Placement("server-0", "server", 0, tuple(range(2 * GPUS)), 0)
    async with place(Plan(1, 2 * GPUS, (big,)), setup_timeout_s=3) as opened:
        with pytest.raises(TimeoutError, match=r"within 3 s.*server-0 with 32 CPU, 8 GPU; the cluster has .* of 8 GPU"):
            await opened.take([big])
    async with place(Plan(1, 2 * GPUS, (big,))) as opened:
        taking = asyncio.create_task(opened.take([big]))
        await asyncio.sleep(0)
        cluster.add("big", gpus=2 * GPUS)
        (slot,) = await taking
        assert slot.node == "big"
        await slot.close()
