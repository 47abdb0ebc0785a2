"""The hostile suite itself: what it judges by notices planted faults, and its inputs follow from their seed.

The suite is `make test-hostile`, outside of `make test`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

import pytest
from harness.proxy import answering, reply
from hostile import code, files, requests
from hostile.answers import judge_error
from hostile.common import SECRET, Report, Usage, judge_account, judge_command, judge_text, run_part

from arealite.api.errors import RewardError, ServerError


def test_what_a_process_keeps_is_seen() -> None:
    before = Usage(files=10, threads=5, children=0, log_bytes=1000)
    assert before.leaks(Usage(18, 12, 0, 90_000), what="it", inputs=10) == []
    later = Usage(files=19, threads=54, children=1, log_bytes=2**20)
    told = before.leaks(later, what="it", inputs=10)
    assert told == [
        "it must have at most 18 files after 10 inputs: got 19",
        "it must have at most 53 threads after 10 inputs: got 54",
        "it must have at most 0 children after 10 inputs: got 1",
        "it must have at most 135072 log_bytes after 10 inputs: got 1048576",
    ]


def test_a_secret_and_a_dead_task_are_seen_and_the_secret_is_not_repeated() -> None:
    assert judge_text("it", "all is well") == []
    (told,) = judge_text("it", f"Authorization: Bearer {SECRET}")
    assert told == "it must not hold the secret: got 'Authorization: Bearer <the secret>'"
    (told,) = judge_text("it", "Task exception was never retrieved")
    assert told.startswith("it must report no 'never retrieved'")
    assert len(judge_text("it", "Traceback (most recent call last): coroutine was never awaited")) == 2


@pytest.mark.parametrize(
    ("status", "text", "told"),
    [
        (0, "done", []),
        (2, "a warning\nFileError: /run/a.json must be whole\n", []),
        (None, "", ["it must end by its deadline"]),
        (1, "x", ["it must end with 0 or 2: got 1"]),
        (-11, "x", ["it must end with 0 or 2: got -11"]),
        (2, "ValueError: bad\n", ["it must say in one error what is wrong with a.json"]),
        (2, "", ["it must say in one error what is wrong with a.json"]),
        (2, "FileError: a.json\nLedgerError: a.json\n", ["it must say in one error what is wrong with a.json"]),
        (2, "Traceback (most recent call last):\nFileError: a.json\n", ["the output of it must report no 'Traceback"]),
    ],
)
def test_a_bad_end_of_a_command_is_seen(status: int | None, text: str, told: list[str]) -> None:
    found = judge_command("it", status, text, "a.json")
    assert len(found) == len(told) and all(one.startswith(start) for one, start in zip(found, told))


def test_a_lost_prompt_is_seen() -> None:
    states = {"trained": 3, "rejected": 1, "failed": 1, "pending": 1}
    assert judge_account(states, 6) == []
    (told,) = judge_account(states, 7)
    assert "must hold: got 7 issued and 6 in" in told


@pytest.mark.parametrize(
    ("program", "leaks", "broken"),
    [
        ("print('fine')", 0, 0),
        ("raise SystemExit(3)", 0, 1),
        ("import threading; threading.Thread(target=threading.Event().wait).start()", 0, 1),
        ("import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])", 1, 0),
        ("import tempfile; tempfile.mkstemp()", 1, 0),
    ],
)
def test_a_part_that_does_not_end_or_leaves_something_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, leaks: int, broken: int
) -> None:
    monkeypatch.setattr("harness.processes.LEFT_S", 1.0)
    timeout_s = 5.0 if "Event" in program else 120.0
    found = run_part([sys.executable, "-c", program], tmp_path / "part", "it", timeout_s)
    assert (len(found[0]), len(found[1])) == (leaks, broken), found


@pytest.mark.parametrize(
    ("answer", "has_secret", "told"),
    [
        (reply(), True, None),
        (reply(status="401 X"), False, None),
        (reply(), False, "must refuse"),
        (reply(status="500 X"), True, "must answer"),
        (b"", True, "must answer"),
        (b"nonsense\r\n", True, "must answer"),
    ],
)
def test_a_server_that_answers_wrongly_is_seen(answer: bytes, has_secret: bool, told: str | None) -> None:
    report = Report()
    with answering(answer) as address:
        target = requests.Target("lite", address, 0, Path(), {}, "")
        inputs = [(requests.whole("POST /generate", b"{}", secret=has_secret), True, has_secret)]
        asyncio.run(requests.fire(report, target, inputs))
    assert report.tried == 1 and [one for one in report.broken if f"lite {told}" not in one] == []
    assert bool(report.broken) == bool(told) and SECRET not in str(report.broken)


def test_a_foreign_error_and_one_with_the_secret_are_told() -> None:
    assert judge_error("a client", ServerError("no"), expected=ServerError) == []
    assert len(judge_error("a client", KeyError("no"), expected=ServerError)) == 1
    assert len(judge_error("a client", ServerError(f"got {SECRET}"), expected=ServerError)) == 1
    try:
        raise ServerError("no") from OSError(SECRET)
    except ServerError as error:
        assert len(judge_error("a client", error, expected=ServerError)) == 1


def test_a_reward_that_becomes_another_number_or_kind_is_told() -> None:
    for outcome, is_right in ((RewardError("", "crash"), True), (1.0, False), (RewardError("", "timeout"), False)):
        report = Report()
        code.judge_reward(report, "dies", outcome)
        assert (report.broken == []) == is_right and report.tried == 1


def test_every_kind_of_damage_is_done(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": [1, 2]}]
    whole = "".join(json.dumps(row) + "\n" for row in rows).encode()
    found = {}
    for kind in files.KINDS:
        path = tmp_path / f"{kind}.jsonl"
        path.write_bytes(whole)
        files.damage(path, kind, random.Random(1))
        is_file = path.is_file() and kind != "unreadable"
        found[kind] = path.read_bytes() if is_file else kind
    assert whole not in found.values() and len(set(found.values())) > len(files.KINDS) - 4
    with pytest.raises(OSError, match="Input/output error"):
        (tmp_path / "unreadable.jsonl").read_bytes()


def test_a_file_that_is_gone_is_seen_unless_it_was_moved_aside(tmp_path: Path) -> None:
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "a.json").touch()
    before = files.names_in(tmp_path)
    (tmp_path / "e").rename(tmp_path / "e.damaged-20260102-030405-000006")
    assert files.names_in(tmp_path) == before
    (tmp_path / "e.damaged-20260102-030405-000006" / "a.json").unlink()
    assert before - files.names_in(tmp_path) == {"e/a.json"}
