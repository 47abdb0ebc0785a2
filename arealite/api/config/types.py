"""The base of config classes, and the types of values: a plain type plus its range, which pydantic checks.

A validator raises ValueError with what ends the sentence "<key> must be ...".
"""

import os
import re
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Strict
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
