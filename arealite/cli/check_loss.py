"""`arealite check-loss`: tries a user's loss or advantage function on the properties that each must have."""

import argparse
import contextlib
import inspect
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from arealite.api.errors import ConfigError
from arealite.api.script import in_one_line, running

_ARGUMENTS = {"loss": ("logprobs", "micro_batch"), "advantage": ("rewards", "group_index", "num_tokens")}
_MAX_TABLES = 3
_SIZES = ((2, 1, 0), (3, 1, 0, 2, 2), (1, 4, 2, 3))  # trained tokens per row, small ones first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "arealite check-loss FILE.py[:FUNCTION] [--kind loss|advantage] [--strict]"
    parser.description = (
        "Call a loss (logprobs, micro_batch) or an advantage function (rewards, group_index, num_tokens) on small "
        "inputs, on a CPU, and show by how much a property fails, and on which input."
    )
    parser.epilog = "exit status: 0 all properties hold (warnings don't count), 1 one fails, 2 the file can't be used"
    parser.add_argument("function", metavar="FILE.py[:FUNCTION]", help="default: every function of these arguments")
    parser.add_argument("--kind", choices=["loss", "advantage"], help="where the arguments don't tell")
    parser.add_argument("--strict", action="store_true", help="let warnings count as failures")


def run(args: argparse.Namespace) -> int:
    """Check `FILE.py:FUNCTION`, or all fitting functions of `FILE.py`; return 0 if all properties hold, else 1."""
    file, _, name = args.function.partition(":")
    script = Path(file).expanduser()
    if not script.is_file():
        raise ConfigError(
            f"check-loss must be given FILE.py or FILE.py:FUNCTION that exists: got {args.function}. Correct it."
        )
    with running(script):
        try:
            names = runpy.run_path(str(script), run_name="__mp_main__")
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{script} must run as far as its functions: got {in_one_line(error)}. Correct it."
            ) from error
        functions = {key: value for key, value in names.items() if (key == name if name else _is_candidate(value))}
        if not functions or not all(map(callable, functions.values())):
            defined = ", ".join(key for key, value in names.items() if inspect.isfunction(value)) or "none"
            wanted = name or "whose first argument is logprobs or rewards"
            raise ConfigError(f"{script} must have a function {wanted}: got {defined}. Name one: {script}:FUNCTION.")
        kinds = {key: _kind(key, value, args.kind) for key, value in functions.items()}
        return int(sum(_fails(key, value, kinds[key], args.strict) for key, value in functions.items()) > 0)


def _is_candidate(value: Any) -> bool:
    """Return whether a value is a function of the file whose first argument is that of a loss or advantage."""
    is_own = inspect.isfunction(value) and value.__module__ == "__mp_main__"
    return is_own and next(iter(inspect.signature(value).parameters), "") in ("logprobs", "rewards")


def _kind(name: str, function: Any, given: str | None) -> str:
    """Return the one kind, by default of all, whose arguments the function takes."""
    kinds = [given] if given else [*_ARGUMENTS]
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
    """Print which properties hold, and return whether a property fails."""
    from arealite.algorithms import properties

    print(f"{name}({', '.join(_ARGUMENTS[kind])})")
    checks: Mapping[str, Callable[[Any, Any], None]] = properties.LOSS_PROPERTIES
    inputs: list[Any] = [properties.random_rows(seed, counts) for seed, counts in enumerate(_SIZES)]
    if kind == "advantage":
        checks, inputs = properties.ADVANTAGE_PROPERTIES, [properties.random_answers(seed) for seed in range(3)]
    num_failed = 0
    for number, (title, check) in enumerate(checks.items()):
        level, problem, columns = "ok", "", dict[str, Any]()
        try:
            for rows in inputs:
                check(function, rows)
        except properties.Violation as violation:
            level = "warning" if isinstance(violation, properties.Remark) else "FAILED"
            problem, columns = str(violation), {**violation.columns}
        except Exception as error:
            level, problem = "FAILED", f"it must not raise: got {in_one_line(error)}"
        print(f"  {level:7}  {title}", *([f"           {problem}"] if problem else []), sep=":\n")
        for column, values in columns.items() if num_failed < _MAX_TABLES else ():
            numbers = "".join(f"{format(value, '.4g'):>11}" for value in values.tolist())
            print(f"             {column:17}{numbers}")
        num_failed += level == "FAILED" or (is_strict and level == "warning")
        if num_failed and number == 0:
            print("           The other properties can be tried when this one holds.")
            break
    return num_failed > 0
