"""A config as a YAML file that people read: comments where keys changed, and those of the old file where they stay."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from omegaconf import OmegaConf

from arealite.migrate.rules import New, Tree

WIDTH = 120
_SHOWN_KEYS = 16  # of a pattern
_PREFERRED = ("experiment_name", "trial_name")


def page(new: New, head: list[str], notes: Mapping[str, list[str]]) -> str:
    """Return the file: `head`, the config with its comments, and what has no counterpart.

    `notes` are the comments of the old file, by its keys; those whose key is gone stand at the end.
    """
    tree = {name: new.tree[name] for name in _PREFERRED if name in new.tree} | new.tree
    origins = {old: key for key, old in reversed(new.origins.items()) if old}  # the first key of several
    kept = {origins.get(old, old): lines for old, lines in notes.items()}
    lines = [*_comment("\n".join(head)), *kept.pop("", []), *_lines(tree, "", new.comments, kept)]
    gone = [f"{key}{_some(new.matched.get(key), key)} -- {why}" for key, why in new.gone.items()]
    if gone:
        lines += ["", "# Without a counterpart here:"]
        lines += [line for one in gone for line in _comment(one, hang="  ")]
    if new.problems:
        lines += ["", "# To decide:"]
        lines += [line for one in new.problems for line in _comment(one, hang="  ")]
    left = [line for texts in kept.values() for line in texts]
    lines += ["", "# Comments of keys that are gone:", *left] if left else []
    return "\n".join(lines) + "\n"


def notes_of(text: str) -> dict[str, list[str]]:
    """Return the comments of a YAML file by the dotted key that they stand above or behind; those at its top by ''."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    lines, notes = text.splitlines(), dict[str, list[str]]()
    last = 0  # line after the previous key; an alias stands where its anchor does, before it
    for path, key, value in _keys(node, ""):
        at = key.start_mark.line
        if at < last:
            continue
        above = [line.strip() for line in lines[last:at] if line.strip().startswith("#")]
        if not last and above:
            notes[""], above = above, []
        is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        end = key.end_mark if is_block else value.end_mark
        behind = lines[end.line][end.column + is_block :].strip() if end.line < len(lines) else ""
        last = max(last, at + 1, end.line + (end.column > 0))
        if found := [*above, *([behind] if behind.startswith("#") else [])]:
            notes[path] = found
    return notes


def _some(keys: list[str] | None, pattern: str) -> str:
    """Return the keys that a pattern matched, in brackets."""
    cut = ", ..." if keys and len(keys) > _SHOWN_KEYS else ""
    return f" ({', '.join(keys[:_SHOWN_KEYS])}{cut})" if keys and keys != [pattern] else ""


def _keys(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield the keys of blocks in the order of their lines."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}{key.value}"
            yield path, key, value
            if (
                isinstance(value, yaml.MappingNode)
                and not value.flow_style
                and value.start_mark.line > key.end_mark.line
            ):
                yield from _keys(value, f"{path}.")


def _lines(block: Tree, prefix: str, comments: Mapping[str, str], notes: dict[str, list[str]]) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in block.items():
        key = f"{prefix}{name}"
        yield from (indent + line for line in notes.pop(key, []))
        is_block = isinstance(value, dict) and bool(value)
        written = [f"{_plain(name)}:"] if is_block else _plain({name: value}).splitlines()
        comment = _printable(comments.get(key, ""))
        fits = len(f"{indent}{written[0]}  # {comment}") <= WIDTH and len([*written, *comment.splitlines()]) == 2
        if comment and fits:
            written = [f"{written[0]}  # {comment}"]
        elif comment:
            yield from (indent + line for line in _comment(comment, width=WIDTH - len(indent)))
        yield from (indent + line for line in written)
        if is_block:
            yield from _lines(value, f"{key}.", comments, notes)


def _plain(value: Any) -> str:
    """Return YAML that the loader reads as the same value."""
    if not isinstance(value, dict):
        return _plain({value: None}).rpartition(":")[0]
    return OmegaConf.to_yaml(OmegaConf.create(value)).rstrip("\n")


def _comment(text: str, *, width: int = WIDTH, hang: str = "") -> list[str]:
    """Return comment lines; what the text breaks stays broken."""
    wrapped = (
        textwrap.wrap(line, width - 2, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)
        for line in _printable(text).splitlines()
    )
    return [f"# {line}" for lines in wrapped for line in lines]


def _printable(text: str) -> str:
    """Return a text without what YAML refuses or takes for the end of a line, but for the ends of lines."""
    return "\n".join("".join(one if one.isprintable() else " " for one in line) for line in text.splitlines())
