"""Log lines out of terminal output, and who is shown on the console."""

from __future__ import annotations

import io
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from fcntl import ioctl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.launcher.supervise.console import Console, LineScreen, Output


def lines_of(*chunks: str, height: int = 4) -> list[str]:
    screen = LineScreen(height)
    return [line for chunk in chunks for line in screen.feed(chunk)] + screen.close()


@pytest.mark.parametrize(
    "written, seen",
    [
        ("a\nb\n", ["a", "b"]),
        ("a\nno newline at the end", ["a", "no newline at the end"]),
        ("\n\na", ["", "", "a"]),
        ("\x1b[31mred\x1b[0m \x1b]8;;link\x07text\x1b]8;;\x07\n", ["red text"]),
        ("dos\r\n", ["dos"]),
        ("10%\r20%\r30%\ndone\n", ["30%", "done"]),
        ("bar 1\r\x1b[2Kline\nbar 2\r\x1b[2K", ["line"]),
        ("top\nbar 1\nbar 2\r\x1b[2K\x1b[1A\x1b[2Knew 1\nnew 2", ["top", "new 1", "new 2"]),
    ],
)
def test_lines_as_a_reader_sees_them(written, seen):
    assert lines_of(written) == seen


@given(st.lists(st.sampled_from(["a", "bc", "\n", "\r", "\x1b[2K", "\x1b[1A", "\x1b[32m", "\x1b]8;;x\x07"])), st.data())
def test_lines_do_not_depend_on_chunks(parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
    assert lines_of(*chunks, height=1000) == lines_of(text, height=1000)


@given(st.text(st.sampled_from("ab\n")))
def test_plain_lines_are_final_at_once(text):
    assert LineScreen(0).feed(text) == text.split("\n")[:-1]


def output_of(tmp_path: Path, written: list[bytes], **options) -> tuple[str, str]:
    """Return what console and log show."""
    stream = io.BytesIO()
    output = Output("p", tmp_path / "p.log", Console(stream), **options)
    for chunk in written:
        output.feed(chunk)
    output.close()
    return stream.getvalue().decode(), (tmp_path / "p.log").read_text()


def test_only_warnings_and_their_indented_lines(tmp_path):
    written = "10:00:00 INFO a: ERRORS: 0 ok\n  detail\n10:00:00 WARNING a: low\n  detail\n"
    written += "Traceback (most recent call last):\n"
    written += '  File "x"\nkey.Error: bad\nordinary\n'
    console, log = output_of(tmp_path, [written.encode()], show="warnings")
    assert log == written
    assert console.splitlines() == [
        "p | 10:00:00 WARNING a: low",
        "p |   detail",
        "p | Traceback (most recent call last):",
        'p |   File "x"',
        "p | key.Error: bad",
    ]


def test_split_characters_and_foreground(tmp_path):
    euro = "1 €\n".encode()
    console, log = output_of(tmp_path, [euro[:3], euro[3:]], is_foreground=True)
    assert console == log == "1 €\n"


def test_nothing_is_shown_but_all_is_logged(tmp_path):
    assert output_of(tmp_path, [b"Error: x\n"], show="nothing") == ("", "Error: x\n")


def on_terminal(command: list[str | Path], **options) -> bytes:
    """Run a command on a terminal of 101 columns and return what it wrote there."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
    written = bytearray()

    def read() -> None:
        try:
            while data := os.read(master, 1 << 16):
                written.extend(data)
        except OSError:  # the last writer has closed it
            pass

    reader = threading.Thread(target=read)
    reader.start()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, **options)
    os.close(slave)
    assert process.wait(120) == 0, bytes(written)
    reader.join(120)
    os.close(master)
    return bytes(written)


def test_rank_0_writes_plain_lines_also_where_we_have_a_terminal(tmp_path):
    (tmp_path / "entry.py").write_text(
        "import sys, time\n"
        "from rich.progress import track\n"
        "print('terminal', sys.stdout.isatty(), sys.stderr.isatty())\n"
        "for step in track(range(20), description='bar'):\n"
        "    time.sleep(0.02)\n"
        "    if step % 10 == 0: print('step', step)\n"
        "print('end')\n"
    )
    (tmp_path / "config.yaml").write_text(
        "{experiment_name: e, trial_name: t, model: {path: tiny}, train_dataset: {path: gsm8k}, allocation_mode: d1,"
        "cluster: {n_gpus_per_node: 0, fileroot: runs}}"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "TERM": "xterm"}
    command = [sys.executable, "-m", "arealite.launcher.local", "entry.py", "--config", "config.yaml"]
    written = on_terminal(command, cwd=tmp_path, env=environment).decode()
    assert "\x1b[2mlauncher |\x1b[0m" in written
    lines = (tmp_path / "runs" / "e" / "t" / "logs" / "trainer-0.log").read_text().splitlines()
    assert lines[0] == "terminal False False" and lines[-1] == "end"
    assert "step 0" in lines and "step 10" in lines and not [line for line in lines if "\x1b" in line]
