"""The base of config classes, the types of values (a plain type plus its range, which pydantic checks), and the keys
of a class as `--help` and the loader see them.

A validator raises ValueError with what ends the sentence "<key> must be ...".
"""

import os
import re
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Strict
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

MISSING = "???"
"""Value of a key that the user must give."""


def _refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a number, not true or false")
    return value


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", name):
        raise ValueError("made of letters, digits, '_', '-' and '.', because it names a folder")
    return name


def _expand_folder(folder: str) -> str:
    if not folder:
        raise ValueError("the path of a folder")
    return os.path.abspath(os.path.expanduser(folder))


def _check_env_vars(text: str) -> str:
    if not all(re.match(r"[A-Za-z_]\w*=", item) for item in text.split(",") if text):
        raise ValueError("written as A=1,B=2")
    return text


Name = Annotated[str, AfterValidator(_check_name)]
Folder = Annotated[str, AfterValidator(_expand_folder)]
EnvVars = Annotated[str, AfterValidator(_check_env_vars)]
Dtype = Literal["float32", "bfloat16", "float16"]
Bool = Annotated[bool, Strict()]

_Integer = Annotated[int, Strict()]
NonNegativeInt = Annotated[_Integer, Ge(0)]
PositiveInt = Annotated[_Integer, Gt(0)]
Port = Annotated[_Integer, Ge(0), Le(65535)]

_NUMBER = BeforeValidator(_refuse_bool)  # last, so that pydantic knows the ranges also where it makes a schema
Finite = Annotated[float, _NUMBER]
NonNegative = Annotated[float, Ge(0), _NUMBER]
Positive = Annotated[float, Gt(0), _NUMBER]
AboveOne = Annotated[float, Gt(1), _NUMBER]
Fraction = Annotated[float, Ge(0), Le(1), _NUMBER]
PositiveFraction = Annotated[float, Gt(0), Le(1), _NUMBER]
HalfOpenFraction = Annotated[float, Ge(0), Lt(1), _NUMBER]
OpenFraction = Annotated[float, Gt(0), Lt(1), _NUMBER]


_RULES = {"missing": "given", "extra_forbidden": "left out"}


def rule_of(problem: ErrorDetails) -> str:
    """Return what ends the sentence "<key> must be ..."."""
    rule = _RULES.get(problem["type"], problem["msg"])
    return rule.removeprefix("Input should be ").removeprefix("Value error, ")


class ConfigBase(BaseModel):
    """Base of config classes: numbers are finite, and may stand for text (`trial_name=0`); unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, coerce_numbers_to_str=True, allow_inf_nan=False
    )
    IS_EXTENDED: ClassVar[bool] = False
    """Whether experiments add keys to this block, which launchers leave to the script."""

    def new(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; blocks are shared with the original."""
        if unknown := changes.keys() - type(self).model_fields.keys():
            raise TypeError(f"{type(self).__name__} must have the fields to change: got {', '.join(sorted(unknown))}.")
        return self.model_copy(update=changes)


class RunBlock(ConfigBase):
    """A block that names its run."""

    experiment_name: Name = ""
    """Filled in from the top level."""
    trial_name: Name = ""
    """Filled in from the top level."""


class FolderBlock(RunBlock):
    """A block that knows the folder of its run."""

    fileroot: Folder = ""
    """Filled in from `cluster.fileroot`."""


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
