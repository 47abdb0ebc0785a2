"""`arealite check-loss`: try a user's loss or advantage function on the properties that each must have."""

import contextlib
import inspect
import runpy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from arealite.algorithms import properties
from arealite.api.errors import ConfigError
from arealite.api.script import in_one_line, running

_ARGUMENTS = {"loss": ("logprobs", "micro_batch"), "advantage": ("rewards", "group_index", "num_tokens")}
_MAX_TABLES = 3
_SIZES = ((2, 1, 0), (3, 1, 0, 2, 2), (1, 4, 2, 3))  # trained tokens per row, small ones first


def check_loss(named: str, kind: str | None = None, *, is_strict: bool = False) -> int:
    """Check `FILE.py:FUNCTION`, or all fitting functions of `FILE.py`; return 0 if all properties hold, else 1."""
    file, _, name = named.partition(":")
    script = Path(file).expanduser()
    if not script.is_file():
        raise ConfigError(f"check-loss must be given FILE.py or FILE.py:FUNCTION that exists: got {named}. Correct it.")
    with running(script):
        try:
            names = runpy.run_path(str(script), run_name="__mp_main__")
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{script} must run as far as its functions: got {in_one_line(error)}. Correct it."
            ) from error
        functions = {key: one for key, one in names.items() if (key == name if name else _is_meant(one))}
        if not functions or not all(map(callable, functions.values())):
            there = ", ".join(key for key, one in names.items() if inspect.isfunction(one)) or "none"
            wanted = name or "whose first argument is logprobs or rewards"
            raise ConfigError(f"{script} must have a function {wanted}: got {there}. Name one: {script}:FUNCTION.")
        kinds = {key: _kind(key, one, [kind] if kind else [*_ARGUMENTS]) for key, one in functions.items()}
        return int(sum(_fails(key, one, kinds[key], is_strict) for key, one in functions.items()) > 0)


def _is_meant(found: Any) -> bool:
    """Whether a name of a file is a function, defined there, whose first argument is that of a loss or advantage."""
    own = inspect.isfunction(found) and found.__module__ == "__mp_main__"
    return own and next(iter(inspect.signature(found).parameters), "") in ("logprobs", "rewards")


def _kind(name: str, function: Any, kinds: Sequence[str]) -> str:
    """Return the one kind whose arguments the function takes."""
    signature, fitting = inspect.signature(function), []
    for kind in kinds:
        with contextlib.suppress(TypeError):
            signature.bind(*_ARGUMENTS[kind])
            fitting.append(kind)
    if len(fitting) != 1:
        forms = " or ".join(f"({', '.join(_ARGUMENTS[kind])})" for kind in kinds)
        remedy = "Add --kind." if fitting else "Bind its other arguments with functools.partial."
        raise ConfigError(f"{name} must take {forms}: got {name}{signature}. {remedy}")
    return fitting[0]


def _fails(name: str, function: Any, kind: str, is_strict: bool) -> bool:
    """Print which properties hold, and whether one does not."""
    print(f"{name}({', '.join(_ARGUMENTS[kind])})")
    checks: Mapping[str, Callable[[Any, Any], None]] = properties.LOSS_PROPERTIES
    inputs: list[Any] = [properties.random_rows(seed, counts) for seed, counts in enumerate(_SIZES)]
    if kind == "advantage":
        checks, inputs = properties.ADVANTAGE_PROPERTIES, [properties.random_answers(seed) for seed in range(3)]
    num_failed = 0
    for title, check in checks.items():
        level, told, columns = _try(check, function, inputs)
        print(f"  {level:7}  {title}{told and ':'}")
        if told:
            print(f"           {told}")
        if columns and num_failed < _MAX_TABLES:
            _show(columns)
        num_failed += level == "FAILED" or (is_strict and level == "warning")
        if num_failed and check is next(iter(checks.values())):
            print("           The other properties can be tried when this one holds.")
            break
    return num_failed > 0


def _try(check: Callable[[Any, Any], None], function: Any, inputs: list[Any]) -> tuple[str, str, Mapping[str, Any]]:
    try:
        for one in inputs:
            check(function, one)
    except properties.Violation as violation:
        return "warning" if isinstance(violation, properties.Remark) else "FAILED", str(violation), violation.columns
    except Exception as error:
        return "FAILED", f"it must not raise: got {in_one_line(error)}", {}
    return "ok", "", {}


def _show(columns: Mapping[str, torch.Tensor]) -> None:
    """Print tensors `[n]`, a line each."""
    for name, values in columns.items():
        print(f"             {name:17}" + "".join(f"{format(value, '.4g'):>11}" for value in values.tolist()))
