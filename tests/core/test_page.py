import re
import time
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
    row = r'<tr class="(\w+)"><td>(\w+) .*?margin-left:(.*?)%;width:(.*?)%.*?<td>([^<]*)</td></tr>'
    kinds, calls, begins, lengths, texts = zip(*re.findall(row, page))
    assert calls == tuple(call.call for call in progress.calls)
    assert kinds == tuple("again" if call.attempt > 1 else "first" for call in progress.calls)
    percent = 100 / 37.2
    assert [*map(float, begins)] == pytest.approx([(call.begin - START) * percent for call in progress.calls], abs=0.01)
    assert [*map(float, lengths)] == pytest.approx([call.seconds * percent for call in progress.calls], abs=0.01)
    assert texts[:4] == ("18.40 s", "2.40 s", "1.10 s", "2.20 s, attempt 2")


def test_each_call_is_shown_once_with_its_state(tmp_path: Path) -> None:
    states = {
        "actor_gen": CallState("done", begin=1000.0, end=1012.3),
        "ref_inf": CallState("replayed", begin=1013.0, end=1014.0),
        "actor_inf": CallState("running", begin=1700000000.0),
    }
    page = render(run_folder(tmp_path), Progress(ppo(), 12, states), now=START)
    found = re.findall(r'<div class="call (\w+)" data-call="(\w+)">(.*?)</div>', page)
    boxes = {name: (status, *re.findall(r">([^<]*)</p>", texts)) for status, name, texts in found}
    assert len(found) == 7 and boxes == {
        "actor_gen": ("done", "actor_gen", "rollout · generate", "", "✓ done in 12.3 s"),
        "actor_inf": ("running", "actor_inf", "actor · inference", "after actor_gen", "▶ running since 22:13:20"),
        "ref_inf": ("replayed", "ref_inf", "ref · inference", "after actor_gen", "↻ replayed in 1.0 s"),
        "critic_inf": ("waiting", "critic_inf", "critic · inference", "after actor_gen", "○ waiting"),
        "advantages": (
            *("waiting", "advantages", "actor · inference"),
            *("after actor_inf, ref_inf, critic_inf", "○ waiting"),
        ),
        "actor_train": ("waiting", "actor_train", "actor · train_step", "after advantages", "○ waiting"),
        "critic_train": ("waiting", "critic_train", "critic · train_step", "after advantages", "○ waiting"),
    }


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
