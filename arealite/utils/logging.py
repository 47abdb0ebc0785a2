"""The log lines of trainers and servers on stderr, the level second: `09:31:02 WARNING arealite.server: text`."""

import logging
import sys

_COLOURS = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "1;31"}


def setup_logging() -> None:
    """Send this process's records to stderr: ours from INFO on, those of libraries from WARNING on.

    A program that has configured logging itself keeps what it has.
    """
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter(colour=sys.stderr.isatty()))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("arealite").setLevel(logging.INFO)


class OneLineFormatter(logging.Formatter):
    """Formats a record, with the level coloured from warnings on if `colour`."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__("%(asctime)s %(level)s %(name)s: %(message)s", datefmt="%H:%M:%S")
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a traceback follows on lines of its own."""
        colour = _COLOURS.get(record.levelno) if self._colour else None
        record.level = f"\x1b[{colour}m{record.levelname}\x1b[0m" if colour else record.levelname
        return super().format(record)
