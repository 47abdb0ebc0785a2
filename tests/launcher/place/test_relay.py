"""A job on a node that is reached through a relay only: the real program over pipes, and what becomes of its job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from arealite.api.errors import ConfigError
from arealite.launcher.place.base import Job, NodeLostError
from arealite.launcher.place.relay import RelaySlot
from arealite.utils.processes import descendants, wait_gone

DEADLINE_S = 120.0


class Heard:
    """Takes in what a job tells."""

    def __init__(self) -> None:
        self.text = ""
        self.came = asyncio.Event()

    def __call__(self, data: bytes) -> None:
        self.text += data.decode()
        self.came.set()

    async def wait_for(self, part: str) -> None:
        """Wait until the job wrote this."""
        async with asyncio.timeout(DEADLINE_S):
            while part not in self.text:
                self.came.clear()
                await self.came.wait()


class Node:
    """A relay as srun or a Ray actor would have it."""

    def __init__(self, process: asyncio.subprocess.Process, timeout_s: float) -> None:
        assert process.stdin is not None
        self.process = process
        self.slot = RelaySlot("far", self.read, process.stdin.write, process.stdin.close, timeout_s=timeout_s)

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, timeout_s: float = DEADLINE_S, *flags: str) -> AsyncIterator[Node]:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "arealite.launcher.place.relay", "--toward", "127.0.0.1", *flags],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        node = cls(process, timeout_s)
        await asyncio.wait_for(node.slot.meet(), DEADLINE_S)
        yield node
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        while await node.read():
            pass
        await process.wait()

    async def read(self) -> bytes:
        assert self.process.stdout is not None
        return await self.process.stdout.read(1000)


def reader_of(written: bytes) -> Callable[[], Awaitable[bytes]]:
    stream = asyncio.StreamReader()
    stream.feed_data(written)
    stream.feed_eof()
    return stream.read


def job(code: str, **env: str) -> Job:
    return Job("job", [sys.executable, "-uc", textwrap.dedent(code)], env)


async def test_a_job_tells_its_output_and_status(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    async with Node.start(DEADLINE_S, "--devices", "0,2") as node:
        heard = Heard()
        assert (node.slot.address, node.slot.gpus) == ("127.0.0.1", ["3", "7"]) and node.slot.port > 0
        task = job(
            "import os, sys; print(os.environ['A'], os.getcwd()); sys.stderr.write('x' * 100_000); sys.exit(7)", A="b"
        )
        assert await node.slot.run(Job(task.name, task.command, task.env, folder=str(tmp_path)), heard) == 7
        assert heard.text == f"b {tmp_path}\n" + "x" * 100_000
        assert await node.process.wait() == 0


@pytest.mark.parametrize("overtaking, status", [("stay", 0), ("terminate", 137)])
async def test_what_overtakes_a_job_is_obeyed(overtaking: str, status: int):
    """Ray may run the calls of an actor in another order than they were made in."""
    async with Node.start() as node:
        assert node.process.stdin is not None
        node.process.stdin.write(f'{{"do": "{overtaking}"}}\n'.encode())
        assert await node.slot.run(job("print('up')"), Heard()) == status


async def test_a_job_can_be_asked_to_end():
    async with Node.start() as node:
        heard = Heard()
        code = "import signal, time; signal.signal(15, lambda *_: exit(3)); print('up'); time.sleep(600)"
        run = asyncio.create_task(node.slot.run(job(code), heard))
        await heard.wait_for("up")
        node.slot.terminate()
        assert await asyncio.wait_for(run, DEADLINE_S) == 3


STUBBORN = """
    import os, signal, subprocess, sys, time
    signal.signal(15, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    "how", ["kill", "launcher is gone", "launcher is gone amid a line", "relay is killed", "guard is killed"]
)
async def test_nothing_outlives_a_job(how):
    async with Node.start() as node:
        heard = Heard()
        run = asyncio.create_task(node.slot.run(job(STUBBORN), heard))
        await heard.wait_for("up")
        tree = descendants(node.process.pid)
        assert len(tree) == 3, "the guard, the job and its child"
        if how == "kill":
            node.slot.kill()
        elif how.startswith("launcher is gone"):
            assert node.process.stdin is not None
            node.process.stdin.write(b'{"do": "ter' if how.endswith("amid a line") else b"")
            node.process.stdin.close()
        elif how == "relay is killed":
            node.process.kill()
        else:
            os.kill(tree[0], signal.SIGKILL)
        outcome = (await asyncio.wait_for(asyncio.gather(run, return_exceptions=True), DEADLINE_S))[0]
        assert await asyncio.to_thread(wait_gone, tree, DEADLINE_S) == set()
        await node.process.wait()
        assert outcome == 137 or isinstance(outcome, NodeLostError)
        if how == "relay is killed":
            assert "the relay on far must exit with a status" in str(outcome)


async def test_a_silent_node_is_lost():
    async with Node.start(timeout_s=5) as node:
        heard = Heard()
        run = asyncio.create_task(node.slot.run(job("import time; print('up'); time.sleep(600)"), heard))
        await heard.wait_for("up")
        node.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(NodeLostError, match="job on far must give a sign of life every 5 s: got nothing"):
                await asyncio.wait_for(run, DEADLINE_S)
        finally:
            tree = descendants(node.process.pid)
            node.process.kill()
            assert await asyncio.to_thread(wait_gone, tree, DEADLINE_S) == set()
            await node.process.wait()


async def test_a_node_without_our_program_is_told(tmp_path):
    slot = RelaySlot("far", reader_of(b"bash: python: command not found\n"), lambda _: None, lambda: None, timeout_s=5)
    with pytest.raises(NodeLostError, match="the relay on far must exit with a status"):
        await slot.meet()


async def test_another_version_is_refused():
    read = reader_of(b'{"hello": {"version": "0.0.1", "address": "h", "port": 1}}\n')
    with pytest.raises(ConfigError, match=r"must have version .* as the launcher: got 0.0.1"):
        await RelaySlot("far", read, lambda _: None, lambda: None, timeout_s=5).meet()


async def test_a_leash_ends_a_job_whose_launcher_says_nothing():
    """Also when its output is not read, so that it can't see that the launcher is gone."""
    async with Node.start(DEADLINE_S, "--watchdog", "3") as node:
        run = asyncio.create_task(node.slot.run(job("while True: print('x' * 10_000)"), Heard()))
        async with asyncio.timeout(DEADLINE_S):
            while len(tree := descendants(node.process.pid)) < 2:  # the guard and the job
                await asyncio.sleep(0.02)
        run.cancel()  # its output is not read from now on
        assert await asyncio.to_thread(wait_gone, [node.process.pid, *tree], DEADLINE_S) == set()
