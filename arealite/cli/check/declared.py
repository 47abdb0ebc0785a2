"""Checks what a script declares by `launched(..., check=NAME)`, e.g. the graph of a master, and prints such a graph.

python -m arealite.cli.check.declared ENTRY.py --config FILE.yaml ...
"""

import functools
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from arealite.api.config.run import declared_check
from arealite.api.errors import ConfigError
from arealite.api.script import running
from arealite.cli.check.findings import Findings
from arealite.core.graph import DataFlowGraph


def check_declared(found: Findings, argv: Sequence[str], script: Path) -> object:
    """What the script declares must fit the config, as its own function says, whose value is returned."""
    if (check := declared_check(script)) is None:
        return None
    with running(script):
        first, *rest = check.split(".")
        top_level = runpy.run_path(str(script), run_name="__mp_main__")
        function = functools.reduce(lambda one, name: getattr(one, name, None), rest, top_level.get(first))
        if not callable(function):
            change = "Define it at module level, as launchers and `arealite check` call it in processes of their own."
            raise ConfigError(f"check of launched must be a function of the script: got {check} in {script}. {change}")
        declared: object = function(list(argv))
    found.add("ok", "what the script declares fits the config")
    return declared


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher says what Ctrl-C means
    findings = Findings(is_brief=True)
    declared = findings.look("graph", check_declared, sys.argv[2:], Path(sys.argv[1]))
    if isinstance(graph := getattr(declared, "graph", declared), DataFlowGraph):
        print(graph, flush=True)
    sys.exit(1 if findings.summarize() else 0)
