"""Nothing that is sent to us over a network is executed: what docs/security.md says of the code, read from the code."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "arealite"
EXECUTING = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
"""Modules whose loading runs code."""
HARMLESS = {"wait", "dumps"}
"""What such modules have besides."""


def test_only_workers_of_our_own_and_those_of_ray_are_sent_pickles() -> None:
    """What a worker of Core unpickles itself is its own error, to see whether Ray can carry it, and `Rows` unpickles
    rows of Python that it holds in memory, never those of a file."""
    using = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not {alias.name for alias in node.names} <= HARMLESS:
                names.append(node.module or "")
            if {name.partition(".")[0] for name in names} & EXECUTING or "multiprocessing.connection" in names:
                using.add(str(file.relative_to(PACKAGE).parent))
    assert using == {"utils", "core", "dataset"}


def test_models_bring_no_code() -> None:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                function = ast.unparse(node.func)
                assert function not in ("torch.load", "eval", "exec"), f"{file}:{node.lineno}"
                for keyword in node.keywords:
                    assert keyword.arg != "trust_remote_code" or ast.unparse(keyword.value) == "False"
