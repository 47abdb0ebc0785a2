"""One console and one log file per process, out of the outputs of many processes.

The foreground process (trainer rank 0) goes through byte for byte, so that its live display keeps working on a
terminal. The lines of the others appear above that display with a dim prefix, and of servers only warnings and worse.
Each log file gets the lines as a reader would see them: without colours, and without frames a live display overwrote.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import sys
from collections import deque
from pathlib import Path
from typing import BinaryIO, Literal

from arealite.utils.files import explain

Show = Literal["all", "warnings", "nothing"]

TAIL_LINES = 20
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]|\r|\n")
_UNFINISHED_CONTROL = re.compile(r"\x1b(?:\[[0-9;?]*|\][^\x07\x1b]*)?$")
_WORSE = re.compile(r"\b(WARNING|WARN|ERROR|CRITICAL|FATAL)\b|^Traceback \(most recent|^[\w.]*(Error|Exception)\b")


class Console:
    """What the user sees. Everything is written by one thread."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self._stream = stream or sys.stdout.buffer
        self.is_terminal = self._stream.isatty()
        self._has_colour = self.is_terminal and not os.environ.get("NO_COLOR")
        self._at_line_start = True

    def fileno(self) -> int:
        """Return the descriptor, to ask for the size of the terminal."""
        return self._stream.fileno()

    def pass_through(self, data: bytes) -> None:
        """Write the bytes of the foreground process, to a terminal."""
        self._write(data)
        self._at_line_start = data.endswith(b"\n")

    def line(self, text: str, *, prefix: str = "", style: str = "") -> None:
        """Write a line of our own, above an unfinished line of the foreground process."""
        if prefix:
            text = f"{self._styled(f'{prefix} |', '2')} {text}"
        start = "" if self._at_line_start else "\r\x1b[2K"
        self._write(f"{start}{self._styled(text, style)}\n".encode())
        self._at_line_start = True

    def close(self) -> None:
        """Leave the terminal in order: a display that was killed may have hidden the cursor."""
        if self.is_terminal:
            self._write(b"\x1b[?25h" if self._at_line_start else b"\x1b[?25h\n")

    def _styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self._has_colour and style else text

    def _write(self, data: bytes) -> None:
        try:
            self._stream.write(data)
            self._stream.flush()
        except OSError:  # the reader went away, as in `| head`: the run goes on, its logs are complete
            self._stream = open(os.devnull, "wb")  # noqa: SIM115


class LineScreen:
    """Turns terminal output into final lines, following what a display of up to `height` lines overwrites.

    A line is final when it is more than `height` above the cursor's; plain output (`height` 0) is never held back.
    """

    def __init__(self, height: int) -> None:
        self._height = height
        self._lines = [""]
        self._row = 0
        self._returned = False
        self._rest = ""

    def feed(self, text: str) -> list[str]:
        """Take output in and return the lines that became final."""
        text = self._rest + text
        unfinished = _UNFINISHED_CONTROL.search(text)
        self._rest = text[unfinished.start() :] if unfinished else ""
        text = text[: unfinished.start()] if unfinished else text
        position = 0
        for control in _CONTROL.finditer(text):
            self._put(text[position : control.start()])
            self._control(control.group())
            position = control.end()
        self._put(text[position:])
        final = max(0, self._row - self._height)
        lines, self._lines, self._row = self._lines[:final], self._lines[final:], self._row - final
        return lines

    def close(self) -> list[str]:
        """Return what is left."""
        lines = self._lines if self._lines[-1] else self._lines[:-1]
        self._lines, self._row = [""], 0
        return lines

    def _put(self, text: str) -> None:
        """Write at the end of the cursor's line, or over it after a carriage return."""
        if text:
            line = "" if self._returned else self._lines[self._row]
            self._lines[self._row] = line + text
            self._returned = False

    def _control(self, control: str) -> None:
        if control == "\n":
            self._row, self._returned = self._row + 1, False
            self._lines += [""] * (self._row + 1 - len(self._lines))
        elif control == "\r":
            self._returned = True
        elif control.startswith("\x1b[") and control.endswith("A"):
            self._row = max(0, self._row - int(control[2:-1] or 1))
        elif control == "\x1b[2K" or (control in ("\x1b[K", "\x1b[0K") and self._returned):
            self._lines[self._row] = ""


class Output:
    """The output of one process: into its log file, onto the console, and its last lines for a report."""

    def __init__(
        self, name: str, path: Path, console: Console, *, show: Show = "all", is_foreground: bool = False
    ) -> None:
        self.name = name
        self.path = path
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._console = console
        self._prefix = "" if is_foreground else name
        self._passes_through = is_foreground and console.is_terminal
        self._show = show
        self._last_shown = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._screen = LineScreen(height=4 if self._passes_through else 0)
        self._log = path.open("a", encoding="utf-8")

    def feed(self, data: bytes) -> None:
        """Take in what the process wrote."""
        if self._passes_through:
            self._console.pass_through(data)
        self._finish(self._screen.feed(self._decoder.decode(data)))

    def close(self) -> None:
        """Write out what is left."""
        self._finish(self._screen.close())
        self._log.close()

    def _finish(self, lines: list[str]) -> None:
        self._write_log("".join(line + "\n" for line in lines))
        for line in lines:
            self.tail.append(line)
            if not self._passes_through and self._is_shown(line):
                self._console.line(line, prefix=self._prefix)

    def _write_log(self, text: str) -> None:
        """Write to the log file; one that can't be written ends with a word about it, and the console goes on."""
        try:
            self._log.write(text)
            self._log.flush()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            self._console.line(f"ERROR: this log ends here: {explain(error, self.path)}", prefix=self.name)

    def _is_shown(self, line: str) -> bool:
        """Tell whether a line goes to the console; indented lines follow the line they belong to."""
        if self._show == "warnings" and not line.startswith((" ", "\t")):
            self._last_shown = bool(_WORSE.search(line))
        return self._show == "all" or (self._show == "warnings" and self._last_shown)
