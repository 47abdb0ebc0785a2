"""Log lines out of terminal output, and who is shown on the console."""

from __future__ import annotations

import io
import os
import pty
import select
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.launcher.supervise.console import Console, Output


def output_of(tmp_path: Path, written: list[bytes], **options) -> tuple[str, str]:
    """Return what console and log show."""
    stream = io.StringIO()
    console = Console(stream)
    output = Output("p", tmp_path / "p.log", console, **options)
    for chunk in written:
        output.feed(chunk)
    output.close()
    console.close()
    return stream.getvalue(), (tmp_path / "p.log").read_text()


@pytest.mark.parametrize(
    "written, seen",
    [
        ("a\nb\n", ["a", "b"]),
        ("a\nno newline at the end", ["a", "no newline at the end"]),
        ("\n\na", ["", "", "a"]),
        ("\x1b[31mred\x1b[0m \x1b]8;;link\x07text\x1b]8;;\x07\n", ["red text"]),
        ("dos\r\n", ["dos"]),
        ("10%\r20%\r30%\ndone\n", ["30%", "done"]),
        ("bar 1\r\x1b[2Kline\n", ["line"]),
        ("completion: \x1b]\nTraceback\n", ["completion: ", "Traceback"]),
        ("\x1bP\x1b_\x1b^\x90\x9d\x1b[\nnext\n", ["\x90\x9d\x1b[", "next"]),
        ("\x1b[1;2A \x1b[;m\x1b[999999999999C\x1b[?25l|\x00\n", [" |\x00"]),
    ],
)
def test_lines_as_a_reader_sees_them(tmp_path, written, seen):
    console, log = output_of(tmp_path, [written.encode()])
    assert log.splitlines() == seen and console.splitlines() == [f"p | {line}" for line in seen]


def test_a_log_that_can_not_be_opened_is_told_and_the_console_continues(tmp_path):
    """As that of an earlier start by another user."""
    (tmp_path / "p.log").mkdir()
    console = Console(stream := io.StringIO())
    output = Output("p", tmp_path / "p.log", console)
    output.feed(b"line\n")
    output.close()
    console.close()
    message, line = stream.getvalue().splitlines()
    assert message.startswith(
        f"p | ERROR: this log ends here: {tmp_path}/p.log must be writable: got IsADirectoryError"
    )
    assert line == "p | line"


@given(st.lists(st.sampled_from(["a", "bc", "\n", "\r", "\x1b[2K", "\x1b[32m", "\x1b]8;;x\x07", "€"])), st.data())
def test_lines_do_not_depend_on_chunks(tmp_path_factory, parts, data):
    written = "".join(parts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=5)))
    chunks = [written[start:end] for start, end in zip([0, *cuts], [*cuts, len(written)])]
    whole, cut = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("cut")
    assert output_of(cut, chunks) == output_of(whole, [written])


def test_only_warnings_and_their_indented_lines(tmp_path):
    written = "10:00:00 INFO a: ERRORS: 0 ok\n  detail\n10:00:00 WARNING a: low\n  detail\n"
    written += "Traceback (most recent call last):\n"
    written += '  File "x"\nkey.Error: bad\nordinary\n'
    console, log = output_of(tmp_path, [written.encode()], only_warnings=True)
    assert log == written
    assert console.splitlines() == [
        "p | 10:00:00 WARNING a: low",
        "p |   detail",
        "p | Traceback (most recent call last):",
        'p |   File "x"',
        "p | key.Error: bad",
    ]


def test_a_line_without_an_end_reaches_the_log_while_it_grows(tmp_path):
    """So that a process that never ends a line can't fill our memory."""
    console = Console(io.StringIO())
    output = Output("p", tmp_path / "p.log", console)
    for _ in range(1000):
        output.feed(b"0123456789abcdef" * 1000)
    assert (tmp_path / "p.log").stat().st_size > 15_000_000
    output.close()
    console.close()
    log = (tmp_path / "p.log").read_text()
    assert log.replace("\n", "") == "0123456789abcdef" * 1_000_000 and len(log) < 16_001_000


def test_lines_wait_for_a_slow_reader_and_nothing_waits_with_them(tmp_path):
    reader, writer = os.pipe()
    console = Console(os.fdopen(writer, "w"))
    output = Output("p", tmp_path / "p.log", console, has_prefix=False)
    lines = [f"{n} {'x' * 90}" for n in range(10_000)]
    for line in lines:
        output.feed(f"{line}\n".encode())
    assert (tmp_path / "p.log").read_text().splitlines() == lines
    output.close()
    closing = threading.Thread(target=console.close)
    closing.start()
    with os.fdopen(reader, encoding="utf-8") as stream:
        assert [stream.readline().rstrip("\n") for _ in lines] == lines
    closing.join(120)
    assert not closing.is_alive()


def test_a_pipe_that_does_not_block_is_waited_for(monkeypatch):
    """Its end, where the traceback is, must not go to /dev/null."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        console = Console()
        monkeypatch.undo()
    lines = [f"{n} {'x' * 90}" for n in range(10_000)]
    for line in lines:
        console.line(line)
    read: list[str] = []

    def read_all() -> None:
        with os.fdopen(reader, encoding="utf-8") as stream:
            read.extend(stream.read().splitlines())

    reading = threading.Thread(target=read_all)
    while not select.select([reader], [], [], 60)[0]:
        pass
    reading.start()
    console.close()
    console._stream.close()
    reading.join(120)
    assert read == lines


def test_a_terminal_that_went_away_ends_the_writing_without_an_error():
    master, slave = pty.openpty()
    console = Console(os.fdopen(slave, "w"))
    console.line("seen")
    assert os.read(master, 1)
    os.close(master)
    errors: list[object] = []
    hook, threading.excepthook = threading.excepthook, errors.append
    try:
        console.line("not seen")
        console.close()
    finally:
        threading.excepthook = hook
    assert not errors and not console._writer.is_alive()
