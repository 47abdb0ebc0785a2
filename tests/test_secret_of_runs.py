"""The secret of a run never leaves it: not by the console, a log, the run folder, a command line or an error.

A whole asynchronous run under faults: a server is killed, another one answers junk, rewards fail with all they know.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from chaos.experiment import Experiment
from cluster import paced
from cluster.followed import PACED
from harness.processes import command_of, marked
from harness.proxy import Request, answering
from testing_quickstart import write_tiny_model
from testing_raw import REPLIES

from arealite.inference.registry import RegistryClient, ServerEntry
from arealite.utils.processes import kill_tree

SECRET = "the-secret-of-this-run-0123456789abcdef"
KNOWS = (str(PACED), "arealite.launcher.place.guard", "arealite.launcher.serve", "arealite.server")
"""What is in the command lines of processes that need the secret."""
DEADLINE_S = 900
JUNK = itertools.cycle(REPLIES.values())
REWARD = """
import itertools, os
from arealite.reward import gsm8k_reward_fn

calls = itertools.count(1)

def reward(*args, **kwargs):
    if next(calls) % 20 == 0:  # too few to end a run: what has failed is tried once more
        raise RuntimeError(f"all I know: {dict(os.environ)}")
    return gsm8k_reward_fn(*args, **kwargs)
"""

pytestmark = pytest.mark.slow


async def junk(_: Request) -> AsyncIterator[bytes]:
    yield next(JUNK)


def test_the_secret_of_a_run_never_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AREALITE_SECRET", raising=False)
    model = write_tiny_model(out=tmp_path / "model", corpus=None, seed=1)
    (tmp_path / "failing.py").write_text(REWARD)
    reward = f"{tmp_path}/failing.py:reward"
    experiment = Experiment(tmp_path / "run", model, "lite.d2+d1", reward=reward, retries=3, entry=PACED)
    run, log = experiment.run_folder, experiment.run_folder / "logs" / "trainer-0.log"
    paced.allow(experiment.folder, experiment.steps // 2)
    run.mkdir(parents=True)
    (run / ".secret").touch(0o600)
    (run / ".secret").write_text(SECRET)
    launcher = experiment.launch()
    seen: dict[str, bool] = {}
    told, was_killed, deadline = 0, False, time.monotonic() + DEADLINE_S
    try:
        with answering(junk) as address:
            entry = ServerEntry("junk", address, "lite", "junk")
            while launcher.process.poll() is None:
                assert time.monotonic() < deadline, launcher.text()
                for pid in marked(experiment.folder):
                    command = " ".join(command_of(pid))
                    assert SECRET not in command
                    with contextlib.suppress(OSError):
                        seen[command] = SECRET.encode() in Path(f"/proc/{pid}/environ").read_bytes()
                    has_trained = (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count("\n")
                    if "-m arealite.server" in command and has_trained and not was_killed:
                        was_killed = True
                        os.kill(pid, signal.SIGKILL)
                if (run / "registry.json").exists():
                    try:
                        asyncio.run(RegistryClient(run / "registry.json", SECRET).put(entry))
                        told += 1
                    except RuntimeError as error:
                        assert SECRET not in f"{error!r} {error}"
                if (
                    was_killed
                    and told > 3
                    and "all I know" in (text := log.read_text())
                    and f"server {address} " in text
                ):
                    paced.allow(experiment.folder, 2 * experiment.steps)
                time.sleep(0.5)
    finally:
        kill_tree(launcher.process.pid)
    output = launcher.text()
    assert launcher.process.returncode == 0, output
    assert "SIGKILL" in output
    logs = {path.name: path.read_text() for path in (run / "logs").iterdir()}
    assert "all I know" in logs["trainer-0.log"] and f"server {address} " in logs["trainer-0.log"]
    leaks = [path for path in experiment.folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert leaks == [run / ".secret"]
    others = {command for command, knows in seen.items() if knows and not any(name in command for name in KNOWS)}
    assert others == set() and any(knows for knows in seen.values())
    assert any("arealite.utils.worker_process" in command and not knows for command, knows in seen.items())
