"""Imports the reward functions that a config names, and checks their signature."""

import importlib
import inspect
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from arealite.api.errors import ConfigError
from arealite.api.reward_api import RewardFunction

_GIVEN = ("prompt", "completions", "prompt_ids", "completion_ids")


def load_rewards(named: str | Mapping[str, float]) -> dict[RewardFunction, float]:
    """Import `FILE.py:FUNCTION` or `module:FUNCTION`, or several with weights; none if a script has its own reward."""
    weights = {named: 1.0} if isinstance(named, str) else named
    functions = [load_named(name, key="reward", kind="function") for name in weights]
    check_names(functions)
    return dict(zip(functions, weights.values()))


def load_named(name: str, *, key: str, kind: str) -> Any:
    """Import what `key` of the config names, `FILE.py:NAME` or `module:NAME`; `kind` is function or class."""
    place, _, leaf = name.rpartition(":")
    file = Path(place).expanduser().resolve() if place.endswith(".py") else None
    message = f"{key} must be FILE.py:{kind.upper()} or module:{kind.upper()} that exists: got {name}. Correct it."
    if place[:1] in ("", ".") if file is None else not file.is_file():
        raise ConfigError(message)
    if file is not None:
        sys.path += [str(file.parent)] * (str(file.parent) not in sys.path)  # workers get it too
    try:
        module = importlib.import_module(place if file is None else file.stem)
    except ModuleNotFoundError as error:
        if f"{place}.".startswith(f"{error.name}."):
            raise ConfigError(message) from error
        raise
    if file is not None and (imported := getattr(module, "__file__", None)) != str(file):
        raise ConfigError(f"the file of a {key} must have a name of its own: got {file}, and {imported}. Rename it.")
    value = getattr(module, leaf, None)
    if not callable(value):
        raise ConfigError(f"{place} must have a {kind} {leaf}: got none. Correct {key}.")
    return value


def check_names(functions: Collection[RewardFunction]) -> None:
    """Refuse functions that share a name, as their metrics have these names."""
    names = [getattr(function, "__qualname__", type(function).__qualname__) for function in functions]
    if len({*names}) < len(names):
        raise ConfigError(f"reward functions must have names of their own: got {names}. Rename one.")


def check_signature(reward_fn: RewardFunction) -> None:
    """Refuse a function that can't be called with one completion and the columns of its row."""
    name = getattr(reward_fn, "__name__", type(reward_fn).__name__)
    try:
        signature = inspect.signature(reward_fn)
    except (TypeError, ValueError):  # some functions that are written in C have no signature
        return
    if "prompts" in signature.parameters or "list" in str(signature.return_annotation).lower():
        raise ConfigError(
            f"reward function {name} must score one completion: got {name}{signature}, which takes and returns lists "
            "as in TRL. Take prompt and completions, one text each, and return a float."
        )
    try:
        signature.bind_partial(**dict.fromkeys(_GIVEN))
    except TypeError as error:
        raise ConfigError(
            f"reward function {name} must take {', '.join(_GIVEN)} and columns by name: got {name}{signature}; "
            f"{error}. Write def {name}(completions, answer, **others)."
        ) from error
