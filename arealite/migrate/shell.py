"""The keys that a shell script gives: `a.b=value` of verl and prime-rl, `--key value` of TRL.

Nothing is run; arithmetic on whole numbers is computed. A variable or key has the first value that the script gives it,
which may be that of another branch.
"""

import ast
import operator
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
_ARRAY = re.compile(r"^\w+\+?=\(")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_IN_BRACKETS = re.compile(r"\$\[([^][]*)\]")  # the older way to write it, in which it is one word
_MAX_ROUNDS = 5  # of variables in the values of variables
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def keys_of_script(text: str, name: str) -> tuple[Tree, list[str]]:
    """Return what a script gives, as blocks, and sentences about keys with several values. Raises ConfigError."""
    try:
        one_word = _ARITHMETIC.sub(lambda one: f"$[{''.join(one[1].split())}]", text)
        words = shlex.split(one_word, comments=True)
    except ValueError as error:
        raise ConfigError(f"{name} must be a shell script: got {error}. Write its keys into a YAML file.") from error
    variables = {"HOME": str(Path.home())}
    for word in words:
        if (found := _ASSIGNMENT.fullmatch(word)) and (value := _expanded(found[2], variables)):
            variables.setdefault(found[1], value)
    bare = [_ARRAY.sub("", word).rstrip(")") for word in words]
    overrides = [found for word in bare if (found := _OVERRIDE.fullmatch(word))]
    pairs = [(one[1], one[2]) for one in overrides] or list(_flags(words))
    values: dict[str, list[str]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(_expanded(value, variables))
    several = [
        f"{key} must have one value: got {' and '.join(dict.fromkeys(given))}. The first one is taken; correct it if "
        "another branch of the script is meant."
        for key, given in values.items()
        if len({*given}) > 1
    ]
    return read_overrides([f"{key}={given[0]}" for key, given in values.items()]), several


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
        changed = _IN_BRACKETS.sub(lambda one: _computed(one[1], variables) or one[0], changed)
        if changed == text:
            break
        text = changed
    if re.fullmatch(r"\$\{\w+:?-\}", text):
        return ""
    text = _IN_BRACKETS.sub(r"$((\1))", text)
    return re.sub(r"\$\{(\w+)[^}]*\}?", r"$\1", text)  # what OmegaConf would take for a reference


def _computed(text: str, variables: dict[str, str]) -> str | None:
    """Return the value of arithmetic on whole numbers; None if it is something else."""
    numbers = re.sub(r"[A-Za-z_]\w*", lambda one: variables.get(one[0], one[0]), text)
    try:
        return str(_value(ast.parse(numbers, mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return int(_OPERATORS[type(op)](_value(left), _value(right)))
    raise ValueError(f"arithmetic must be on whole numbers: got {type(node).__name__}.")
