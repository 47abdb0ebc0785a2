"""One console for the outputs of all processes, and one log file per process with all its lines, without colours."""

import codecs
import contextlib
import os
import queue
import re
import sys
import threading
from collections import deque
from pathlib import Path
from typing import TextIO

from arealite.api.script import FOR_LOG
from arealite.utils.files import explain

_NUM_LAST_LINES = 20
_READER_S = 15.0  # for the reader of the last lines
_MAX_LINE = 1 << 16  # characters after which a line is cut
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_WORSE = re.compile(r"\b(WARNING|WARN|ERROR|CRITICAL|FATAL)\b|^Traceback \(most recent|^[\w.]*(Error|Exception)\b")


class Console:
    """The terminal or file that the user reads. A thread writes it, so that Ctrl-S or a pager never holds up a run."""

    def __init__(self, stream: TextIO | None = None) -> None:
        if stream is None:
            # Not sys.stdout itself: the interpreter waits for its lock at exit.
            stream = open(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", errors="replace")  # noqa: SIM115
            os.set_blocking(stream.fileno(), True)  # another owner of the terminal may have set O_NONBLOCK
        self._stream = stream
        self._pending: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="arealite-console", daemon=True)
        self._writer.start()

    def line(self, text: str, *, prefix: str = "") -> None:
        """Write a line."""
        self._pending.put(f"{prefix} | {text}\n" if prefix else f"{text}\n")

    def close(self) -> None:
        """Write the pending lines."""
        self._pending.put(None)
        self._writer.join(_READER_S)

    def _write(self) -> None:
        try:
            while (line := self._pending.get()) is not None:
                self._stream.write(line)
                self._stream.flush()
        except OSError:  # the reader went away, as in `| head`: the run continues, and its logs are complete
            with contextlib.suppress(OSError):
                self._stream.close()
            while self._pending.get() is not None:
                pass


class Output:
    """The output of one process: its log file, its lines on the console, and its last lines for a report."""

    def __init__(
        self, name: str, path: Path, console: Console, *, only_warnings: bool = False, has_prefix: bool = True
    ) -> None:
        self.name = name
        self.path = path
        self.hidden: deque[str] = deque(maxlen=_NUM_LAST_LINES)  # the last lines that are not on the console
        self.has_lines = False
        self._console = console
        self._prefix = name if has_prefix else ""
        self._only_warnings = only_warnings
        self._is_shown = not only_warnings  # the last line
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        try:
            self._log = path.open("a", encoding="utf-8")
        except OSError as error:
            self._end_log(error)

    def feed(self, data: bytes) -> None:
        """Take what the process wrote."""
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        if len(self._rest) > _MAX_LINE:
            lines, self._rest = [*lines, self._rest], ""
        self._finish(lines)

    def close(self) -> None:
        """Write a last line that has no end."""
        self._finish([self._rest] if self._rest else [])
        self._log.close()

    def _end_log(self, error: OSError) -> None:
        self._log = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        self._console.line(f"ERROR: this log ends here: {explain(error, self.path)}", prefix=self.name)

    def _finish(self, written: list[str]) -> None:
        """Log and show whole lines, without control codes and as they were overwritten last."""
        lines = [_CONTROL.sub("", line).rstrip("\r").rpartition("\r")[2] for line in written]
        self.has_lines |= bool(lines)
        try:
            self._log.write("".join(line.removeprefix(FOR_LOG) + "\n" for line in lines))
            self._log.flush()
        except OSError as error:  # the log ends, and the console continues
            with contextlib.suppress(OSError):
                self._log.close()
            self._end_log(error)
        for line in lines:
            if line.startswith(FOR_LOG):
                continue
            if self._only_warnings and not line.startswith((" ", "\t")):  # indented lines belong to the line before
                self._is_shown = bool(_WORSE.search(line))
            if self._is_shown:
                self._console.line(line, prefix=self._prefix)
            else:
                self.hidden.append(line)
