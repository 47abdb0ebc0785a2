"""The keys that a shell script gives: `a.b=value` of verl and prime-rl, `--key value` of TRL.

Nothing is run. A variable has the first value that the script gives it, which may be that of another branch.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from arealite.api.config.loader import read_overrides
from arealite.api.errors import ConfigError
from arealite.migrate.rules import Tree

_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.+)", re.DOTALL)
_OVERRIDE = re.compile(r"\+{0,2}(\w+(?:\.\w+)+)=(.*)", re.DOTALL)
_MAX_ROUNDS = 5  # of variables in the values of variables


def keys_of_script(text: str, name: str) -> Tree:
    """Return what a script gives, as blocks. Raises ConfigError."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"{name} must be a shell script: got {error}. Write its keys into a YAML file.") from error
    variables = {"HOME": str(Path.home())}
    for word in words:
        if (found := _ASSIGNMENT.fullmatch(word)) and (value := _expanded(found[2], variables)):
            variables.setdefault(found[1], value)
    overrides = [found for word in words if (found := _OVERRIDE.fullmatch(word.rstrip(")")))]
    if overrides:
        return read_overrides([f"{one[1]}={_expanded(one[2], variables)}" for one in overrides])
    return read_overrides([f"{key}={_expanded(value, variables)}" for key, value in _flags(words)])


def _flags(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield `--key value` and `--key=value`; a flag without a value is true."""
    for word, following in zip(words, [*words[1:], "--"]):
        key, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and key.isidentifier():
            yield key, value if equals else "true" if following.startswith("--") else following


def _expanded(text: str, variables: dict[str, str]) -> str:
    """Put values and defaults in place of variables; what is unknown stays."""
    for _ in range(_MAX_ROUNDS):
        changed = _VARIABLE.sub(lambda one: variables.get(one[1] or one[3]) or (one[2] if one[2] else one[0]), text)
        if changed == text:
            break
        text = changed
    if re.fullmatch(r"\$\{\w+:?-\}", text):
        return ""
    return re.sub(r"\$\{(\w+)[^}]*\}?", r"$\1", text)  # what OmegaConf would take for a reference
