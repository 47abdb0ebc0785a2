"""The rooms of the package and who may import whom; importing the package costs nothing and does nothing."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from arealite.api.cli_args import GRPOConfig
from arealite.api.config.types import config_keys
from arealite.cli.main import COMMANDS

PACKAGE = Path(__file__).parents[1] / "arealite"

MAY_IMPORT = {
    "api": {"utils.network", "utils.terminal"},
    "utils": set(),
    "chat": {"api", "utils"},
    "planner": {"api", "utils", "inference.backends", "launcher.plan"},
    "algorithms": {"utils.tensors"},
    "generation": {"api", "utils"},
    "reward": {"api", "utils"},
    "dataset": {"api", "utils", "chat"},
    "rollout": {"api", "utils"},
    "watchdog": {"api", "utils"},
    "server": {"api", "utils", "generation"},
    "inference": {"api", "utils", "rollout", "server.app"},
    "engine": {"api", "utils", "algorithms", "planner.memory", "inference.remote_engine", "inference.backends"},
    "weights": {"api", "utils", "engine", "inference"},
    "workflow": {"api", "utils", "reward", "chat"},
    "agent": {"api", "utils", "chat", "workflow", "rollout.event_loop", "dataset.verifiers"},
    "launcher": {"api", "utils", "watchdog", "inference.backends", "inference.registry"},
    "viewer": {"api", "utils", "rollout.account"},
    "simulate": {"api", "utils", "planner", "rollout", "inference", "engine", "weights", "workflow"},
    "core": {
        *("api", "utils", "algorithms", "rollout", "engine", "inference", "weights", "workflow", "reward", "dataset"),
        *("trainer", "viewer", "launcher.place", "launcher.plan"),
    },
    "trainer": {
        *("api", "utils", "algorithms", "rollout", "engine", "inference", "weights", "workflow", "reward", "dataset"),
    },
    "tinker": {"api", "utils", "algorithms", "rollout", "engine", "inference", "weights", "planner.needs"},
}
"""Besides itself and the package's version: rooms, folders or files. `cli` may import anything."""

ROOM_CEILINGS = {
    "__init__.py": 93,
    "agent": 1714,
    "algorithms": 883,
    "api": 2854,
    "chat": 584,
    "cli": 2104,
    "core": 2136,
    "dataset": 1019,
    "engine": 2682,
    "generation": 943,
    "inference": 2553,
    "launcher": 2590,
    "planner": 700,
    "reward": 624,
    "rollout": 2285,
    "server": 510,
    "simulate": 654,
    "tinker": 700,
    "trainer": 872,
    "utils": 2134,
    "viewer": 989,
    "watchdog": 217,
    "weights": 188,
    "workflow": 772,
}
"""Lines of code of each room. A ceiling may fall; it rises only with a new capability, and the commit says which."""
CEILINGS = {
    "code of the package": 30800,
    "files of a GRPO run": 145,
    "code of a GRPO run": 18831,
    "import depth": 18,
    "keys of a GRPO config": 361,
    "lines of pages": 6223,
    "lines of README.md": 130,
}
MAX_FUNCTION_LINES, MAX_FILE_LINES = 60, 600
LONG_FUNCTIONS: set[str] = set()
"""Functions above that limit, until they are split."""
MAY_NAME = {
    "api": {
        *("core.master", "core.workers"),
        *("launcher.serve.sglang_server", "launcher.serve.vllm_server", "server"),
    },
    "launcher": {"cli.check"},
    "trainer": {"cli.main"},
}
"""Modules of other rooms that a room starts as a program, or looks for in the user's script."""

FILES = sorted(PACKAGE.rglob("*.py"))


def imported(file: Path, body: ast.AST) -> Iterator[str]:
    """Name the modules of ours that the code imports, for type checkers too."""
    package = ["arealite", *file.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "arealite")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "arealite":
                yield from (f"arealite.{alias.name}" for alias in node.names)
            elif module.startswith("arealite."):
                yield module


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_arrows(file: Path) -> None:
    room, *rest = file.relative_to(PACKAGE).parts
    tree = ast.parse(file.read_text())
    modules = {name.removeprefix("arealite.") for name in imported(file, tree) if "." in name} - {"__version__"}
    if not rest:
        for_checkers = {node for block in tree.body if isinstance(block, ast.If) for node in ast.walk(block)}
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node not in for_checkers]
        assert imports == [node for node in imports if node.module == "importlib"], "the package itself imports no room"
    elif room != "cli":
        allowed = MAY_IMPORT[room] | {room}
        forbidden = [name for name in modules if not any(f"{name}.".startswith(f"{one}.") for one in allowed)]
        assert forbidden == [], f"{room} may import {sorted(MAY_IMPORT[room])}"


def test_modules_of_other_rooms_that_are_named_in_strings() -> None:
    """A program that is started as `-m arealite.x` is an arrow that no import shows."""
    named: dict[str, set[str]] = {}
    for file in FILES:
        room, *rest = file.relative_to(PACKAGE).parts
        for node in ast.walk(ast.parse(file.read_text())) if rest and room != "cli" else ():
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if re.fullmatch(r"arealite(\.\w+)+", text):
                path = PACKAGE.parent / text.replace(".", "/")
                is_module = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
                if is_module and text.split(".")[1] != room:
                    named.setdefault(room, set()).add(text.removeprefix("arealite."))
    assert named == MAY_NAME


def test_no_two_rooms_import_each_other() -> None:
    arrows = {
        (file.relative_to(PACKAGE).parts[0], name.split(".")[1])
        for file in FILES
        for name in imported(file, ast.parse(file.read_text()))
        if "." in name
    }
    assert [arrow for arrow in arrows if arrow[0] < arrow[1] and arrow[::-1] in arrows] == []


@pytest.mark.parametrize("room", ["inference", "reward", "rollout", "workflow"])
def test_our_own_blocking_calls_do_not_queue_behind_those_of_workflows(room: str) -> None:
    """In the loop of the episodes `asyncio.to_thread` is for users, and may have no thread left."""
    calls = ("to_thread", "run_in_executor")
    for file in (PACKAGE / room).rglob("*.py"):
        used = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        assert used.isdisjoint(calls), f"{file} must use utils.background.in_thread"


@functools.cache
def code_lines(file: Path) -> int:
    """Count lines that are not blank, not only a comment, and not part of a docstring."""
    text = file.read_text()
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    docs = [node for node in nodes if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]
    in_docs = {line for node in docs for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(text.splitlines(), start=1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") and n not in in_docs for n, line in lines)


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(file): file for file in FILES}


def at_run_time(body: ast.AST) -> Iterator[ast.AST]:
    """Walk the code without the blocks that only type checkers read."""
    for node in ast.iter_child_nodes(body):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from at_run_time(node)


@functools.cache
def modules_loaded_by(file: Path) -> frozenset[str]:
    """Name the modules of ours that a file imports directly at run time, also inside functions."""
    package = module_name(file).split(".") if file.name == "__init__.py" else module_name(file).split(".")[:-1]
    loaded: set[str] = set()
    for node in at_run_time(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            loaded.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            loaded.update([module, *(f"{module}.{alias.name}" for alias in node.names)])
    return frozenset(loaded & MODULES.keys())


def closure(*modules: str) -> set[str]:
    """Name the modules with code that these modules stand on, themselves included."""
    seen: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting.extend(modules_loaded_by(MODULES[module]))
    return {module for module in seen if code_lines(MODULES[module])}


@functools.cache
def import_depth(module: str) -> int:
    """Count the modules of the longest chain of imports that begins here."""
    below = [name for name in modules_loaded_by(MODULES[module]) if not module.startswith(f"{name}.")]
    return 1 + max((import_depth(name) for name in below if name != module), default=0)


def markdown_lines(*patterns: str) -> int:
    pages = [page for pattern in patterns for page in PACKAGE.parent.glob(pattern)]
    return sum(len(page.read_text().splitlines()) for page in pages)


def test_ceilings() -> None:
    """What must not grow unnoticed. A GRPO run is the example's script, the local launcher and the embedded server."""
    example = PACKAGE.parent / "examples/arealite/gsm8k_grpo.py"
    programs = ("arealite.launcher.local", "arealite.launcher.serve.__main__", "arealite.server.__main__")
    run = closure(*modules_loaded_by(example), *programs)
    sizes = {
        "code of the package": sum(map(code_lines, FILES)),
        "files of a GRPO run": len(run),
        "code of a GRPO run": sum(code_lines(MODULES[module]) for module in run),
        "import depth": max(map(import_depth, MODULES)),
        "keys of a GRPO config": sum(key.block is None for key in config_keys(GRPOConfig)),
        "lines of pages": markdown_lines("docs/**/*.md"),
        "lines of README.md": markdown_lines("README.md"),
    }
    assert {name: size for name, size in sizes.items() if size > CEILINGS[name]} == {}, CEILINGS


def test_room_ceilings() -> None:
    rooms: Counter[str] = Counter()
    for file in FILES:
        rooms[file.relative_to(PACKAGE).parts[0]] += code_lines(file)
    assert {room: lines for room, lines in rooms.items() if lines > ROOM_CEILINGS[room]} == {}, ROOM_CEILINGS


def test_functions_and_files_can_be_read_in_one_go() -> None:
    texts = {str(file.relative_to(PACKAGE)): file.read_text() for file in FILES}
    functions = {
        f"{name}:{node.name}"
        for name, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= MAX_FUNCTION_LINES
    }
    assert functions <= LONG_FUNCTIONS
    assert {name for name, text in texts.items() if len(text.splitlines()) > MAX_FILE_LINES} == set()


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_our_imports_stand_at_the_top(file: Path) -> None:
    if file.relative_to(PACKAGE).parts[0] == "cli":
        return  # each command imports its own machinery, so that --help is quick
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inner = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, functions)]
    assert [name for function in inner for name in imported(file, function)] == []


PROBE = """
import sys
before = set(sys.modules)
import {modules}
after = set(sys.modules)
import json, threading
print(json.dumps([sorted(after - before), threading.active_count()]))
"""
HEAVY = {"torch", "transformers", "tensordict"}


def probe(folder: Path, modules: str) -> tuple[set[str], int]:
    """Import in a fresh interpreter that may write no file: return what was loaded, and the number of threads."""
    env = os.environ | {"HOME": str(folder), "PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    code = PROBE.format(modules=modules)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=True)
    loaded, threads = json.loads(done.stdout)
    assert list(folder.iterdir()) == []
    return set(loaded), threads


def test_importing_the_package_loads_nothing_else(tmp_path: Path) -> None:
    loaded, threads = probe(tmp_path, "arealite")
    assert (loaded - {*sys.builtin_module_names}, threads) == ({"arealite"}, 1)


def test_the_front_door_imports_no_torch(tmp_path: Path) -> None:
    """Nor do the modules of commands, so that each --help is quick."""
    modules = ["arealite.cli.own_trainer", *(f"arealite.cli.{name.replace('-', '_')}" for name in COMMANDS)]
    loaded, threads = probe(tmp_path, ", ".join(modules))
    assert (loaded & HEAVY, threads) == (set(), 1)


@pytest.mark.parametrize("room", ["api", "reward", "launcher"])
def test_light_rooms_import_no_torch(tmp_path: Path, room: str) -> None:
    modules = [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in FILES]
    modules = [name.removesuffix(".__init__") for name in modules if name.startswith(f"arealite.{room}.")]
    not_ours = ("__main__", "vllm_weights")  # programs, and what runs in vLLM's environment
    loaded, threads = probe(tmp_path, ", ".join(name for name in modules if not name.endswith(not_ours)))
    assert (loaded & HEAVY, threads) == (set(), 1)


def test_declaring_a_graph_imports_no_torch(tmp_path: Path) -> None:
    loaded, threads = probe(tmp_path, "arealite.core.graph")
    assert (loaded & HEAVY, threads) == (set(), 1)
