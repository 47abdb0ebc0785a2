"""One line per record, with the level as the second word."""

from __future__ import annotations

import logging
import re
import subprocess
import sys

from arealite.utils.logging import OneLineFormatter


def test_line():
    record = logging.LogRecord("server", logging.WARNING, "", 0, "%d slots", (3,), None)
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING server: 3 slots", OneLineFormatter(colour=False).format(record))
    assert "\x1b[33mWARNING\x1b[0m server: 3 slots" in OneLineFormatter(colour=True).format(record)


SETUP = """
import logging
from arealite.utils.logging import setup_logging
setup_logging()
setup_logging()
for name in ("arealite.x", "library"):
    logging.getLogger(name).warning("careful")
    logging.getLogger(name).info("news")
    logging.getLogger(name).debug("never")
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return re.sub(r"^\d\d:\d\d:\d\d ", "", done.stderr, flags=re.MULTILINE)


def test_setup_in_a_program():
    assert run(SETUP) == "WARNING arealite.x: careful\nINFO arealite.x: news\nWARNING library: careful\n"


def test_a_program_that_has_configured_logging_keeps_it():
    own = "import logging; logging.basicConfig(format='mine: %(message)s')"
    assert run(own + SETUP) == "mine: careful\nmine: careful\n"
