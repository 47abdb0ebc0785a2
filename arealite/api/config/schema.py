"""The keys of a config class: its pydantic fields and those of its blocks, as `--help` and the loader see them."""

import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from arealite.api.config.types import MISSING, ConfigBase


@dataclass(frozen=True)
class ConfigKey:
    """One key of a config class."""

    parent: str  # the name of its block; empty at the top level
    leaf: str
    owner: type[ConfigBase]
    default: Any
    block: type[ConfigBase] | None  # the class of its own keys
    is_mapping: bool | None  # whether its value has keys; None if it may
    is_optional: bool  # whether null is a value
    type_name: str  # in words

    @property
    def name(self) -> str:
        return f"{self.parent}.{self.leaf}" if self.parent else self.leaf

    @property
    def doc(self) -> str:
        """The string under the field."""
        return " ".join((self.owner.model_fields[self.leaf].description or "").split())


def config_keys(config_cls: type[ConfigBase], parent: str = "", defaults: Any = None) -> Iterator[ConfigKey]:
    """Walk all keys, a block before its own keys; `defaults` is an instance of the class."""
    defaults = config_cls() if defaults is None else defaults
    for name, field in config_cls.model_fields.items():
        key = _key(config_cls, parent, name, field, getattr(defaults, name))
        yield key
        if key.block is not None:
            yield from config_keys(key.block, key.name, key.default)


def _key(owner: type[ConfigBase], parent: str, name: str, field: FieldInfo, default: Any) -> ConfigKey:
    options = _options(field.annotation)
    block = next((option for option in options if _is_block(option)), None)
    kinds = {get_origin(option) is dict for option in options if option is not type(None)}
    is_mapping = block is not None or (None if len(kinds) == 2 else True in kinds)
    type_name = " or ".join(_in_words(option) for option in options)
    return ConfigKey(parent, name, owner, default, block, is_mapping, type(None) in options, type_name)


def config_help(config_cls: type[ConfigBase], words: Collection[str] = ()) -> str:
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


def _is_block(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, ConfigBase)


def _in_words(hint: Any) -> str:
    """Render a type annotation in plain words."""
    words = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}
    if hint in words:
        return words[hint]
    if get_origin(hint) is list:
        return "list of " + " or ".join(_in_words(option) for option in _options(get_args(hint)[0]))
    if get_origin(hint) is dict:
        return "block of any keys"
    if _is_block(hint):
        return "block"
    return " or ".join(str(choice) for choice in get_args(hint)) or str(hint)
