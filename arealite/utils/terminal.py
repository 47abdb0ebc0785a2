"""Text for people at a terminal: log lines, usage errors, names in sentences, and a reader of stdout that may leave."""

import argparse
import contextlib
import difflib
import logging
import os
import re
import select
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import NoReturn

_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)$", re.DOTALL)


def setup_logging() -> None:
    """Send this process's records to stderr, as `09:31:02 WARNING arealite.server: text`: ours from INFO, those of
    libraries from WARNING. A program that has configured logging keeps its configuration."""
    if logging.getLogger().handlers:
        return
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("arealite").setLevel(logging.INFO)


class Parser(argparse.ArgumentParser):
    """Adds the closest choice to a usage error."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        if choice := _CHOICE.search(message):
            near = difflib.get_close_matches(choice[1], re.findall(r"[\w-]+", choice[2]), n=1)
            message += "".join(f". Did you mean {name}?" for name in near)
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n")


def listed(names: Iterable[str]) -> str:
    """Join names as in a sentence: `a, b and c`, or `none`."""
    *first, last = list(names) or ["none"]
    return f"{', '.join(first)} and {last}" if first else last


def nearest(name: str, names: Iterable[str], *, otherwise: str = "") -> str:
    """Suggest the most similar of `names` as a question; without one return `otherwise`, by default the choices."""
    near = difflib.get_close_matches(name, known := list(names), n=1)
    return f"Did you mean {near[0]}?" if near else otherwise or f"Use one of {', '.join(known)}."


@contextlib.contextmanager
def until_reader_leaves() -> Iterator[None]:
    """Exit silently if the reader of stdout has closed the pipe, as in `... | head`."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None and not isinstance(sys.exc_info()[1], Exception):  # an error comes first
                sys.stdout.flush()
    except BrokenPipeError:
        if sys.stdout is None or not _has_left():  # it was another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        sys.exit(128 + signal.SIGPIPE)


def _has_left() -> bool:
    """Return True if stdout has no reader any more."""
    output = select.poll()
    output.register(sys.stdout.fileno(), select.POLLERR)
    return bool(output.poll(0))
