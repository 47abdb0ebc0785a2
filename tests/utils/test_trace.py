"""What processes trace, read as Perfetto reads it; real processes, as clocks and kills are the point."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testing_trace import assert_nested, read_spans

from arealite.utils import trace

PRELUDE = "import asyncio, os, sys, threading, time\nfrom arealite.utils import heartbeat, trace\n"


def program(folder: Path, name: str, code: str) -> subprocess.Popen[str]:
    """Start code that is traced under a name; it ends its lines of output with what the test waits for."""
    env = os.environ | {trace.FOLDER_VARIABLE: str(folder), "AREALITE_PROCESS_NAME": name}
    command = [sys.executable, "-c", f"{PRELUDE}heartbeat.start()\n{code}"]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Trace this process, and return the folder."""
    monkeypatch.setenv(trace.FOLDER_VARIABLE, str(tmp_path / "trace"))
    monkeypatch.setattr(trace, "_writer", None)
    trace.start("the test")
    yield tmp_path / "trace"
    os.close(trace._writer._file)  # type: ignore[union-attr]


def test_without_the_variable_a_span_is_always_the_same_empty_one() -> None:
    assert trace._writer is None and trace.span("x", tokens=3) is trace.span("y")


def test_processes_share_a_clock_and_one_that_is_killed_loses_its_last_line(traced: Path, tmp_path: Path) -> None:
    code = """
with heartbeat.waiting("outer", on="ranks"):
    with trace.span("inner", tokens=7): time.sleep(0.05)
def beside():
    with trace.span("beside"): pass
thread = threading.Thread(target=beside); thread.start(); thread.join()
print(flush=True); sys.stdin.read()
"""
    with trace.span("ours", path=tmp_path):
        theirs = program(traced, "theirs", code)
        theirs.stdout.readline()
    with trace.span("after"):
        pass
    theirs.send_signal(signal.SIGKILL)
    theirs.communicate()
    (part,) = (path for path in traced.glob("*.jsonl") if f".{theirs.pid}-" in path.name)
    with part.open("a") as file:
        file.write('{"pid": 3, "ph": "X", "na')
    trace.join(tmp_path / "trace.json.gz")
    found = {span.name: span for span in read_spans(tmp_path / "trace.json.gz")}
    assert_nested([*found.values()])
    assert set(found) == {"ours", "outer", "inner", "beside", "after"}
    order = ["ours", "outer", "inner", "beside", "after"]
    assert sorted(found, key=lambda name: found[name].began_s) == order, "also between processes"
    assert found["outer"].ended_s <= found["beside"].began_s <= found["ours"].ended_s <= found["after"].began_s
    assert 0.0499 <= found["inner"].length_s <= found["outer"].length_s, "in whole microseconds"
    assert found["inner"].args == {"tokens": 7} and found["beside"].thread != found["outer"].thread
    assert found["ours"].process.startswith("the test (") and found["outer"].process.startswith("theirs (")
    assert -60 < found["ours"].began_s - time.time() < 60
    assert [path.suffix for path in traced.iterdir()] == [".jsonl", ".jsonl"]


async def test_spans_of_an_event_loop_know_what_they_are_in(traced: Path, tmp_path: Path) -> None:
    go = [asyncio.Event(), asyncio.Event()]

    async def request(until: asyncio.Event) -> None:
        with trace.span("request"):
            await until.wait()

    with trace.span("episode"):
        tasks = [asyncio.create_task(request(one)) for one in go]
        await asyncio.sleep(0)
        go[0].set()
        await tasks[0]
        with trace.span("reward"):
            await asyncio.sleep(0)
        go[1].set()
        await tasks[1]
    with trace.span("another"):
        pass
    trace.join(tmp_path / "trace.json.gz")
    found = read_spans(tmp_path / "trace.json.gz")
    episode = next(one for one in found if one.name == "episode")
    assert [(one.name, one.args.get("in")) for one in found] == [
        ("episode", None), ("request", episode.id), ("request", episode.id), ("reward", episode.id), ("another", None),
    ]  # fmt: skip
    assert len({one.id for one in found}) == 5
    first, second, reward = (one for one in found if one.args)
    assert first.ended_s <= reward.began_s < reward.ended_s <= second.ended_s <= episode.ended_s


def test_a_process_writes_so_much_and_warns_that_it_ends(
    traced: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace._writer, "_left_bytes", 2000)
    for index in range(100):
        with trace.span("x", index=index):
            pass
    (part,) = traced.glob("*.jsonl")
    assert 2000 < part.stat().st_size < 2600
    assert [record.levelname for record in caplog.records] == ["WARNING"]
