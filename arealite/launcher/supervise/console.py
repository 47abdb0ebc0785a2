"""One console and one log file per process, out of the outputs of many processes.

On a terminal a bar below the lines shows how far the trainer is. Rank 0's lines have no prefix, those of the others a
dim one, and of servers only warnings and worse are shown. Each log file gets all lines, without colours.
"""

import codecs
import contextlib
import os
import re
import sys
from collections import deque
from pathlib import Path
from typing import BinaryIO, Literal

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from arealite.utils.files import explain

Show = Literal["all", "warnings"]

TAIL_LINES = 20
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_WORSE = re.compile(r"\b(WARNING|WARN|ERROR|CRITICAL|FATAL)\b|^Traceback \(most recent|^[\w.]*(Error|Exception)\b")


class Console:
    """What the user sees. Everything is written by one thread."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self._stream = stream or sys.stdout.buffer
        self._terminal = rich.console.Console(highlight=False) if self._stream.isatty() else None
        self._bar: Progress | None = None

    @property
    def is_terminal(self) -> bool:
        return self._terminal is not None

    def line(self, text: str, *, prefix: str = "") -> None:
        """Write a line, above the bar."""
        line = Text.assemble((f"{prefix} |", "dim"), f" {text}") if prefix else Text(text)
        try:
            if self._terminal is not None:
                self._terminal.print(line, soft_wrap=True)
            else:
                self._stream.write(f"{line.plain}\n".encode())
                self._stream.flush()
        except OSError:  # the reader went away, as in `| head`: the run continues, its logs are complete
            self._stream, self._terminal = open(os.devnull, "wb"), None  # noqa: SIM115

    def show_progress(self, step: int, total_steps: int, phase: str) -> None:
        """Draw the bar, on a terminal: steps done and what the trainer is doing."""
        if self._terminal is None:
            return
        if self._bar is None:
            self._bar = Progress(
                TextColumn("[bold]{task.description:<10}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("elapsed"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._terminal,
                transient=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.add_task(phase, total=total_steps, completed=step)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=min(step, total_steps), description=phase, refresh=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


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
        self._show = show
        self._last_shown = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._log = path.open("a", encoding="utf-8")

    def feed(self, data: bytes) -> None:
        """Take in what the process wrote."""
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        self._finish(lines)

    def close(self) -> None:
        """Write out what is left."""
        self._finish([self._rest] if self._rest else [])
        self._log.close()

    def _finish(self, written: list[str]) -> None:
        """Take whole lines as a reader would see them: without control codes, and as they were overwritten last."""
        lines = [_CONTROL.sub("", line).rstrip("\r").rpartition("\r")[2] for line in written]
        self._write_log("".join(line + "\n" for line in lines))
        for line in lines:
            self.tail.append(line)
            if self._is_shown(line):
                self._console.line(line, prefix=self._prefix)

    def _write_log(self, text: str) -> None:
        """Write to the log file; one that can't be written ends with a line that says so, and the console continues."""
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
        return self._show == "all" or self._last_shown
