"""`python -m arealite.cli.check here|elsewhere ENTRY.py --config FILE.yaml ...`: what a launcher runs before it starts
anything, here if it starts all of it on this node."""

import logging
import os
import signal
import sys

from arealite.cli.check.check import check
from arealite.utils.devices import this_node

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher says what Ctrl-C means
    logging.disable(logging.WARNING)  # the script says it again
    where, entry, *argv = sys.argv[1:]
    preflight = this_node() if where == "here" else True
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # from here on: a check takes no memory of a GPU
    sys.exit(check(entry, argv, preflight=preflight))
