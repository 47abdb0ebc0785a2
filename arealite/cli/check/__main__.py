"""`python -m arealite.cli.check ENTRY.py --config FILE.yaml ...`: what a launcher runs before it starts anything."""

import logging
import signal
import sys

from arealite.cli.check.check import check

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher says what Ctrl-C means
    logging.disable(logging.WARNING)  # the script says it again
    sys.exit(check(sys.argv[1], sys.argv[2:], is_preflight=True))
