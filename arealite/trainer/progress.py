"""The live line below the log on a terminal: steps done, time left and the phase the loop is in.

It stays one line on 80 columns. Whatever else is printed meanwhile, through `print`, `logging` or warnings, scrolls
above it.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class LiveProgress:
    """Draws the progress of a run until `close`, or until the program ends."""

    def __init__(self, *, total_steps: int) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.fields[phase]:<10}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            transient=True,
            refresh_per_second=2,
        )
        self._total_steps = total_steps
        self._task = self._progress.add_task("", total=total_steps, phase="starting")
        self._streams = {id(sys.stdout): "stdout", id(sys.stderr): "stderr"}
        self._redirected: list[tuple[logging.StreamHandler, object]] = []
        self._progress.start()
        self._redirect_logging()
        atexit.register(self.close)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show what the loop is doing."""
        self._progress.update(self._task, phase=name)
        try:
            yield
        finally:
            self._progress.update(self._task, phase="")

    def advance(self, line: str | None, *, steps_done: int) -> None:
        """Print the line of a step (if it has one) above the bar and move the bar."""
        if line is not None:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._progress.update(self._task, completed=min(steps_done, self._total_steps))

    def close(self) -> None:
        """Remove the live line and give the streams back; more calls do nothing."""
        atexit.unregister(self.close)
        self._progress.stop()
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected.clear()

    def _redirect_logging(self) -> None:
        """Point log handlers that hold the terminal's streams at those that print above the live line."""
        for handler in _stream_handlers():
            name = self._streams.get(id(handler.stream))
            if name is not None:
                self._redirected.append((handler, handler.stream))
                handler.setStream(getattr(sys, name))


def _stream_handlers() -> list[logging.StreamHandler]:
    loggers = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    return [
        handler
        for logger in loggers
        if isinstance(logger, logging.Logger)
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler)
    ]
