"""What keys a config class has: found by walking its dataclass fields, explained by the strings under them."""

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

MISSING = "???"  # the value of a key that the user must give


@dataclass(frozen=True)
class ConfigKey:
    """One key of a config class."""

    parent: str  # the name of its block; empty at the top level
    leaf: str
    owner: type
    default: Any
    block: type | None  # the dataclass of its own keys
    is_mapping: bool | None  # whether its value has keys; None if it may
    is_optional: bool  # whether null is a value
    type_name: str  # in words

    @property
    def name(self) -> str:
        return f"{self.parent}.{self.leaf}" if self.parent else self.leaf

    @property
    def doc(self) -> str:
        """The string under the field."""
        return _docs(self.owner).get(self.leaf, "")


def config_keys(config_cls: type, parent: str = "", defaults: Any = None) -> Iterator[ConfigKey]:
    """Walk all keys, a block before its own keys; `defaults` is an instance of the class."""
    hints = get_type_hints(config_cls, include_extras=True)
    defaults = config_cls() if defaults is None else defaults
    for field in dataclasses.fields(config_cls):
        options, default = _options(hints[field.name]), getattr(defaults, field.name)
        classes = (option for option in options if isinstance(option, type))
        block = next((cls for cls in classes if dataclasses.is_dataclass(cls)), None)
        kinds = {get_origin(option) is dict for option in options if option is not type(None)}
        is_mapping = block is not None or (None if len(kinds) == 2 else True in kinds)
        type_name = " or ".join(_in_words(option) for option in options)
        is_optional = type(None) in options
        key = ConfigKey(parent, field.name, config_cls, default, block, is_mapping, is_optional, type_name)
        yield key
        if block is not None:
            yield from config_keys(block, key.name, default)


def config_help(config_cls: type, words: Collection[str] = ()) -> str:
    """Return name, type, default and explanation of every key, or of those with one of the words in their names."""
    lines = []
    for key in config_keys(config_cls):
        if key.block is None and (not words or any(word in key.name for word in words)):
            default = "must be given" if key.default == MISSING else f"default {key.default!r}"
            lines.append(f"{key.name} ({key.type_name}; {default})\n    {key.doc}")
    return "\n".join(lines) or f"no key has {' or '.join(map(repr, words))} in its name"


def _options(hint: Any) -> list[Any]:
    """Return the types in `X`, `Annotated[X, ...]` or `X | Y`."""
    if get_origin(hint) is Annotated:
        return _options(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [option for part in get_args(hint) for option in _options(part)]
    return [hint]


def _in_words(hint: Any) -> str:
    """Render a type annotation in plain words."""
    words = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}
    if hint in words:
        return words[hint]
    if get_origin(hint) is list:
        return "list of " + " or ".join(_in_words(option) for option in _options(get_args(hint)[0]))
    if get_origin(hint) is dict:
        return "block of any keys"
    if dataclasses.is_dataclass(hint):
        return "block"
    return " or ".join(str(choice) for choice in get_args(hint)) or str(hint)


@functools.cache
def _docs(config_cls: type) -> dict[str, str]:
    """Collect the strings under the fields of a class and its bases; the subclass wins. No source, no strings."""
    docs: dict[str, str] = {}
    for cls in filter(dataclasses.is_dataclass, reversed(config_cls.__mro__)):
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        except (OSError, TypeError):
            continue
        assert isinstance(node, ast.ClassDef)
        for statement, below in itertools.pairwise(node.body):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    docs[name] = " ".join(doc.split())
    return docs
