"""Junk for everything that reads what others wrote: servers, the client, files, workflows and rewards."""

import sys
from pathlib import Path

# The programs that train for the tests of these rooms lie there.
sys.path += [str(Path(__file__).parents[1] / room) for room in ("engine", "trainer")]
