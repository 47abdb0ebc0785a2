import re
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
from testing_graphs import PPO, ppo

from arealite.api.alloc_mode import ParallelSizes
from arealite.api.run_folder import RunFolder
from arealite.core.page import Incident, Progress, render, write_page
from arealite.core.records import CallRecord, CallState
from arealite.launcher.plan.layout import Group

START = 1_760_000_000.0  # 2025-10-09 08:53:20 UTC


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def record(call: str, group: str, begin: float, end: float, moved_mib: float, attempt: int = 1) -> CallRecord:
    role, machines = PPO[call].role, ("gpu-07",) if group == "critic" else ("gpu-05", "gpu-06")
    return CallRecord(11, call, role, group, START + begin, START + end, moved_mib, attempt, machines)


@pytest.fixture
def progress() -> Progress:
    """Return what a step of PPO looks like, in which the critic's workers were lost once."""
    calls = [
        record("actor_gen", "servers", 0.0, 18.4, 21.3),
        record("actor_inf", "actor", 18.5, 20.9, 12.8),
        record("critic_inf", "critic", 18.5, 19.6, 12.8),
        record("critic_inf", "critic", 24.1, 26.3, 12.8, attempt=2),
        record("ref_inf", "critic", 26.3, 28.4, 12.8),
        record("advantages", "actor", 28.5, 28.6, 29.9),
        record("actor_train", "actor", 28.7, 37.2, 38.4),
        record("critic_train", "critic", 28.7, 34.0, 38.4),
    ]
    states = {
        "actor_gen": CallState("done", START + 37.3, START + 55.1),
        "actor_inf": CallState("running", START + 55.2),
        "critic_inf": CallState("replayed", START + 55.2, START + 56.4),
    }
    machines = {
        Group("actor", ("actor",), ParallelSizes(data=4), "PACK", None, 1): ["gpu-05", "gpu-06"],
        Group("critic", ("critic", "ref"), ParallelSizes(data=2), "PACK", None, 1): ["gpu-07"],
    }
    text = "rank 1 of group critic died in critic_inf on gpu-04 <signal 9>; its workers were started anew on gpu-07"
    return Progress(ppo(), 12, states, machines, calls, [Incident(START + 19.6, text)])


def run_folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "ppo" / "<first>")


def tables(page: str) -> list[list[str]]:
    """Return the texts of the rows of all tables."""
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    return [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in rows]


def test_page_shows_groups_and_incidents(tmp_path: Path, progress: Progress) -> None:
    page = render(run_folder(tmp_path), progress, now=START + 57)
    assert tables(page) == [
        ["group", "roles", "ranks", "machines", "idle in the last step"],
        ["actor", "actor", "4", "gpu-05, gpu-06", "70%"],
        ["critic", "critic, ref", "2", "gpu-07", "71%"],
        ["time", "what happened"],
        [
            "2025-10-09 08:53:39",
            "rank 1 of group critic died in critic_inf on gpu-04 &lt;signal 9&gt;; its workers were started anew on "
            "gpu-07",
        ],
    ]
    assert "Step 12 is running. This page was written on 2025-10-09 at 08:54:17." in page
    cards = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd><p>(.*?)</p>", page)
    assert cards == [
        ("Last step", "37.2 s", "8 calls of step 11"),
        ("Overlap", "1.19", "seconds of calls per second"),
        ("Moved", "179.2 MiB", "between workers"),
        ("Run again", "1", "calls after a failure"),
    ]
    assert "ppo / &lt;first&gt;" in page and "<first>" not in page
    assert re.findall(r"<script|@import|src=|href=", page) == [] and "default-src 'none'" in page, (
        "it needs nothing else"
    )


def test_timeline_has_a_bar_per_attempt(tmp_path: Path, progress: Progress) -> None:
    page = render(run_folder(tmp_path), progress, now=START + 57)
    drawings = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    timeline = drawings[1]
    bars = [(group.attrib["data-call"], group.attrib["class"]) for group in timeline.iter("g")]
    assert bars == [(call.call, "again" if call.attempt > 1 else "first") for call in progress.calls]
    rects = [{name: float(rect.attrib[name]) for name in ("x", "width")} for rect in timeline.iter("rect")]
    per_s = 720 / 37.2
    begins = [(rect["x"] - rects[0]["x"]) / per_s for rect in rects]
    assert begins == pytest.approx([call.begin - START for call in progress.calls], abs=0.01)
    lengths = [rect["width"] / per_s for rect in rects]
    assert lengths == pytest.approx([call.seconds for call in progress.calls], abs=0.01)
    texts = [text.text for text in timeline.iter("text")]
    assert "2.20 s, attempt 2" in texts and [text for text in texts if text and re.fullmatch(r"\d+ s", text)] == [
        f"{second} s" for second in range(0, 40, 10)
    ]


def test_a_finished_page_reloads_no_more(tmp_path: Path, progress: Progress) -> None:
    run = run_folder(tmp_path)
    run.path.mkdir(parents=True)
    write_page(run, progress, now=START + 57)
    assert '<meta http-equiv="refresh" content="2">' in run.graph.read_text()
    write_page(run, Progress(ppo(), 12, {}, {}, [], [], is_finished=True), now=START + 60)
    page = run.graph.read_text()
    assert "refresh" not in page and "Step 12 was the last." in page and "None so far." in page
    assert "Timeline" not in page and page.count("○ waiting") == 7
    assert [path.name for path in run.path.iterdir()] == ["graph.html"]
