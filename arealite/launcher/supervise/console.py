"""One console and one log file per process, out of the outputs of many processes.

On a terminal a bar below the lines shows how far the trainer is. Rank 0's lines have no prefix, those of the others a
dim one, and of servers only warnings and worse are shown. Each log file gets all lines, without colours.
"""

import codecs
import contextlib
import io
import os
import re
import select
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from arealite.api.script import FOR_LOG
from arealite.utils.files import explain

TAIL_LINES = 20
_MAX_PENDING = 1 << 22  # characters that wait for a reader of the console
_READER_S = 5.0  # how long a reader who has stopped reading is waited for at the end
_MAX_LINE = 1 << 16  # characters after which a line ends, also if its process does not end it
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_WORSE = re.compile(r"\b(WARNING|WARN|ERROR|CRITICAL|FATAL)\b|^Traceback \(most recent|^[\w.]*(Error|Exception)\b")


class _Descriptor(io.FileIO):
    """Waits for room also if O_NONBLOCK is set, which other owners of the pipe or terminal may do at any time."""

    def write(self, data: Any, /) -> int:
        while (num_written := super().write(data)) is None:
            room = select.poll()
            room.register(self, select.POLLOUT)
            room.poll()
        return num_written


class Console:
    """What the user sees. A thread writes it, because whoever should read it may not (Ctrl-S, a pager, an ssh session
    that lost its network): the oldest lines that find no room are dropped and counted, and nobody waits for them."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        # A file of its own, not sys.stdout, whose lock the interpreter waits for when it ends.
        self._stream = stream or io.BufferedWriter(_Descriptor(os.dup(sys.stdout.fileno()), "wb"))
        self.is_terminal = self._stream.isatty()
        if self.is_terminal:
            self._terminal = rich.console.Console(
                file=io.TextIOWrapper(self._stream, errors="replace"), highlight=False
            )
        self._bar: Progress | None = None
        self._changed = threading.Condition()
        self._pending: deque[Text] = deque()
        self._num_pending = 0  # characters of `_pending`
        self._num_dropped = 0  # lines that came before `_pending`
        self._progress: tuple[int, int, str] | None = None
        self._is_closed = False
        self._num_written = 0  # lines
        self._writer = threading.Thread(target=self._write, name="arealite-console", daemon=True)
        self._writer.start()

    def line(self, text: str, *, prefix: str = "") -> None:
        """Write a line, above the bar."""
        with self._changed:
            self._pending.append(_line(text, prefix))
            self._num_pending += len(self._pending[-1]) + 1
            while self._num_pending > _MAX_PENDING:
                self._num_pending -= len(self._pending.popleft()) + 1
                self._num_dropped += 1
            self._changed.notify()

    def show_progress(self, step: int, total_steps: int, phase: str) -> None:
        """Draw the bar, on a terminal: steps done and what the trainer is doing."""
        with self._changed:
            self._progress = (step, total_steps, phase)
            self._changed.notify()

    def close(self) -> None:
        """Write what is left as long as somebody reads it, and remove the bar."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        num_written = -1
        while self._writer.is_alive() and num_written != self._num_written:
            num_written = self._num_written
            self._writer.join(_READER_S)

    def _write(self) -> None:
        """Write what is pending, until nothing is and the console is closed."""
        is_last = False
        while not is_last:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._progress or self._is_closed)
                lines, progress, is_last = self._pending, self._progress, self._is_closed
                if self._num_dropped:
                    text = f"{self._num_dropped} lines are not shown here, because nobody read them; the logs have them"
                    lines.appendleft(_line(text, "launcher"))
                self._pending, self._num_pending, self._num_dropped, self._progress = deque(), 0, 0, None
            try:
                for line in lines:
                    if self.is_terminal:
                        self._terminal.print(line, soft_wrap=True)
                    else:
                        self._stream.write(f"{line.plain}\n".encode(errors="replace"))
                        self._stream.flush()
                    self._num_written += 1
                if progress is not None and self.is_terminal:
                    self._draw(*progress)
                if is_last and self._bar is not None:
                    self._bar.stop()
            except OSError:  # the reader went away, as in `| head`: the run continues, its logs are complete
                with contextlib.suppress(OSError):
                    self._stream.close()
                self._stream, self.is_terminal, self._bar = open(os.devnull, "wb"), False, None  # noqa: SIM115

    def _draw(self, step: int, total_steps: int, phase: str) -> None:
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


def _line(text: str, prefix: str) -> Text:
    return Text.assemble((f"{prefix} |", "dim"), f" {text}") if prefix else Text(text)


class Output:
    """The output of one process: into its log file, onto the console, and its last lines for a report."""

    def __init__(
        self, name: str, path: Path, console: Console, *, only_warnings: bool = False, is_foreground: bool = False
    ) -> None:
        self.name = name
        self.path = path
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.unseen: deque[str] = deque(maxlen=TAIL_LINES)  # the last lines that the console could have shown
        self._console = console
        self._prefix = "" if is_foreground else name
        self._only_warnings = only_warnings
        self._is_shown = not only_warnings  # the last line
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        try:
            self._log = path.open("a", encoding="utf-8")
        except OSError as error:
            self._end_log(error)

    def feed(self, data: bytes) -> None:
        """Take in what the process wrote."""
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        if len(self._rest) > _MAX_LINE:
            lines, self._rest = [*lines, self._rest], ""
        self._finish(lines)

    def close(self) -> None:
        """Write out what is left."""
        self._finish([self._rest] if self._rest else [])
        self._log.close()

    def _end_log(self, error: OSError) -> None:
        self._log = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        self._console.line(f"ERROR: this log ends here: {explain(error, self.path)}", prefix=self.name)

    def _finish(self, written: list[str]) -> None:
        """Take whole lines as a reader would see them: without control codes, and as they were overwritten last."""
        lines = [_CONTROL.sub("", line).rstrip("\r").rpartition("\r")[2] for line in written]
        try:
            self._log.write("".join(line.removeprefix(FOR_LOG) + "\n" for line in lines))
            self._log.flush()
        except OSError as error:  # the log ends with a line that says so, and the console continues
            with contextlib.suppress(OSError):
                self._log.close()
            self._end_log(error)
        for line in lines:
            self.tail.append(line.removeprefix(FOR_LOG))
            if line.startswith(FOR_LOG):
                continue
            if self._only_warnings and not line.startswith((" ", "\t")):  # these go with the line before
                self._is_shown = bool(_WORSE.search(line))
            if self._is_shown:
                self._console.line(line, prefix=self._prefix)
            else:
                self.unseen.append(line)
