"""The checks that a launcher runs before it starts anything: `python -m arealite.cli.check WHERE ENTRY.py ARGUMENTS`.

WHERE is `here` if the launcher starts all processes on this node, else `elsewhere`; `declared` checks only what the
script declares, and prints it if it is a graph.
"""

import logging
import os
import signal
import sys
from pathlib import Path

from arealite.cli.check.check import check
from arealite.cli.check.findings import Findings
from arealite.cli.check.script import check_declared
from arealite.core.graph import DataFlowGraph
from arealite.utils.devices import this_node

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher reports Ctrl-C
    where, entry, *argv = sys.argv[1:]
    if where == "declared":
        findings = Findings(is_brief=True)
        declared = findings.look("graph", check_declared, argv, Path(entry))
        if isinstance(graph := getattr(declared, "graph", declared), DataFlowGraph):
            print(graph, flush=True)
        sys.exit(1 if findings.summarize() else 0)
    logging.disable(logging.WARNING)  # the script logs the same warnings
    preflight = this_node() if where == "here" else True
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # from here on: a check takes no memory of a GPU
    sys.exit(check(entry, argv, preflight=preflight))
