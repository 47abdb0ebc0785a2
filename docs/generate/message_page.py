"""The page of error messages: every sentence of the form `<what> must <rule>` in the source."""

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PATH = "reference/errors.md"


@dataclass(frozen=True)
class Message:
    """A message; a value inserted at run time is shown as `<name>`, or `…` without a short name."""

    file: str  # relative to the repository
    line: int
    error: str  # the class that is raised with it, empty if it is passed on
    text: str


def pages() -> dict[str, str]:
    """Return the page, by path."""
    all_messages = messages()
    lines = [
        "# Error messages\n",
        f"The {len(all_messages)} messages in the source that state a rule. Values inserted at run time are shown as "
        "`<name>` or `…`. A message has the form `<what> must <rule>: got <value>. <what to change>`; causes "
        "and cures of the commonest are in [troubleshooting](../troubleshooting.md).\n",
    ]
    for file, group in itertools.groupby(all_messages, key=lambda message: message.file):
        lines.append(f"## `{file}`\n")
        lines += [f"- {_kind(message)}{_code(message.text)}" for message in group]
        lines.append("")
    return {PATH: "\n".join(lines)}


def messages(folders: tuple[str, ...] = ("arealite", "examples", "training")) -> list[Message]:
    """Return the messages of all files, in their order."""
    files = sorted(file for folder in folders for file in (REPOSITORY / folder).rglob("*.py"))
    return [message for file in files for message in sorted(_of_file(file), key=lambda message: message.line)]


def _of_file(file: Path) -> Iterator[Message]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    errors: dict[ast.AST, str] = {}  # an outer raise before those inside of it
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
                errors |= dict.fromkeys(ast.walk(node), name)
    seen: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            seen.add(node.value)  # a docstring
        text = None if node in seen else _text(node)
        if text is not None and isinstance(node, ast.expr):
            seen.update(ast.walk(node))
            if is_message(text):
                path = file.relative_to(REPOSITORY).as_posix()
                yield Message(path, node.lineno, errors.get(node, ""), " ".join(text.split()))


def is_message(text: str) -> bool:
    """Return whether a text states a rule, and the value or the change."""
    return bool(re.search(r"\S must (?:not )?\w.*(?:: |\. [A-Z])", " ".join(text.split())))


def _text(node: ast.AST) -> str | None:
    """Return a literal text, with names for inserted values."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) or _name(value) for value in values)
    return None


def _name(value: ast.AST) -> str:
    """Return the short name of an expression in a text."""
    match value:
        case ast.FormattedValue(value=ast.Name(id=name) | ast.Attribute(attr=name)):
            return f"<{name.strip('_')}>"
    return "…"


def _kind(message: Message) -> str:
    return f"{message.error}: " if message.error else ""


def _code(text: str) -> str:
    """Return inline code that may hold backticks."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"
