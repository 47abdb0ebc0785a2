"""Standard output whose reader may leave."""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def until_reader_leaves() -> Iterator[None]:
    """End without a word where the reader of standard output has left, as in `... | head`."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None and not isinstance(sys.exc_info()[1], Exception):  # an error comes first
                sys.stdout.flush()
    except BrokenPipeError:
        if sys.stdout is None or not _has_left():  # it was another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        sys.exit(128 + signal.SIGPIPE)


def _has_left() -> bool:
    """Tell whether nobody reads standard output any more."""
    output = select.poll()
    output.register(sys.stdout.fileno(), select.POLLERR)
    return bool(output.poll(0))
