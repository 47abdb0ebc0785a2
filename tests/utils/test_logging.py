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


def test_setup_in_a_program():
    code = (
        "from arealite.utils.logging import setup_logging\n"
        "log = setup_logging('arealite.x', 'INFO'); setup_logging('arealite.x'); log.info('once'); log.debug('never')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO arealite.x: once\n", done.stderr)
