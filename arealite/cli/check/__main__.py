"""`python -m arealite.cli.check ENTRY.py --config FILE.yaml ...`: what a launcher runs before it starts anything."""

import logging
import os
import signal
import sys

from arealite.cli.check.check import check
from arealite.utils.devices import this_node

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher says what Ctrl-C means
    logging.disable(logging.WARNING)  # the script says it again
    node = this_node()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # from here on: a check takes no memory of a GPU
    sys.exit(check(sys.argv[1], sys.argv[2:], preflight_on=node))
