"""Pages of the Python API: one per package, with every public function and class, by mkdocstrings."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "arealite"
FOLDER = "reference/api"
PROGRAMS = {"cli", "launcher", "server", "viewer", "watchdog"}
"""Packages that are programs, not imports: the page of commands covers them."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def pages() -> dict[str, str]:
    """Return one page per room, and an index, by path."""
    rooms: dict[str, list[str]] = {}
    for module, _ in modules():
        rooms.setdefault(module.split(".")[1], []).append(module)
    programs = sorted(room for room in PROGRAMS if (PACKAGE / room).is_dir())
    index = [
        "# Python\n",
        "Every public class and function of the packages that your programs import, with types. Packages of programs "
        f"({', '.join(f'`{room}`' for room in programs)}) are on the page of [commands](../commands.md). "
        "[The floor plan](../../architecture.md#floor-plan) describes the packages.\n",
        "## `from arealite import ...`\n",
        "| name | what it is |\n|---|---|",
        *exported(),
        "\n## Rooms\n",
        "| room | modules |\n|---|---|",
        *(f"| [`arealite.{room}`]({room}.md) | {', '.join(map(_linked, names))} |" for room, names in rooms.items()),
    ]
    found = {f"{FOLDER}/index.md": "\n".join(index) + "\n"}
    for room, names in rooms.items():
        found[f"{FOLDER}/{room}.md"] = "\n\n".join([f"# `arealite.{room}`", *(f"::: {name}" for name in names)]) + "\n"
    return found


@functools.cache
def modules() -> list[tuple[str, list[Definition]]]:
    """Return the modules of the importable packages, with their public functions and classes."""
    return [*_modules()]


def _modules() -> Iterator[tuple[str, list[Definition]]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        *parts, name = file.relative_to(PACKAGE).with_suffix("").parts
        parts += [name] if name != "__init__" else []
        is_public = parts and parts[0] not in PROGRAMS and not any(part.startswith("_") for part in parts)
        if is_public and (found := definitions(file)):
            yield ".".join(("arealite", *parts)), found


def definitions(file: Path) -> list[Definition]:
    """Return the public functions and classes of a file."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return [node for node in body if isinstance(node, Definition) and not node.name.startswith("_")]


def exported() -> Iterator[str]:
    """Yield a row for each exported name, in alphabetical order, with the first line of its docstring."""
    homes = {node.name: (module, node) for module, nodes in modules() for node in nodes}
    nodes = ast.walk(ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")))
    imports = [
        node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("arealite.")
    ]
    for name in sorted((alias.name for node in imports for alias in node.names), key=str.lower):
        module, node = homes[name]
        line = (ast.get_docstring(node) or "").partition("\n")[0].replace("|", "\\|")
        yield f"| [`{name}`]({module.split('.')[1]}.md#{module}.{name}) | {line} |"


def _linked(module: str) -> str:
    """Return a link to the module on the page of its package."""
    _, room, *rest = module.split(".")
    return f"[`{'.'.join(rest) or room}`]({room}.md#{module})"
