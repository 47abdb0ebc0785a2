"""`arealite check-loss`: tries a user's loss or advantage function on the properties that each must have."""

import argparse
import inspect
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from arealite.api.errors import ConfigError
from arealite.api.script import in_one_line, running

_SIZES = ((2, 1, 0), (3, 1, 0, 2, 2), (1, 4, 2, 3))  # trained tokens per row, small ones first


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "arealite check-loss FILE.py[:FUNCTION]"
    parser.description = (
        "Call a loss (logprobs, micro_batch) or an advantage function (rewards, group_index, num_tokens) on small "
        "inputs, on a CPU, and show by how much a property fails, and on which input."
    )
    parser.epilog = "exit status: 0 all properties hold, 1 one fails, 2 the file can't be used"
    parser.add_argument(
        "function", metavar="FILE.py[:FUNCTION]", help="default: every function whose first argument has that name"
    )


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
        own = [key for key, value in names.items() if getattr(value, "__module__", "") == "__mp_main__"]
        kinds = {key: _first_argument(names.get(key)) for key in ([name] if name else own)}
        functions = [key for key, kind in kinds.items() if kind in ("logprobs", "rewards")]
        if not functions:
            defined = ", ".join(key for key, value in names.items() if inspect.isfunction(value)) or "none"
            wanted = f"{name} whose first argument is logprobs or rewards".lstrip()
            raise ConfigError(f"{script} must have a function {wanted}: got {defined}. Name one: {script}:FUNCTION.")
        return max([_fails(key, names[key], kinds[key] == "logprobs") for key in functions])


def _first_argument(function: Any) -> str:
    """Return the name of the first argument, by which a loss and an advantage function are told apart."""
    has_arguments = callable(function) and not isinstance(function, type)
    return next(iter(inspect.signature(function).parameters), "") if has_arguments else ""


def _fails(name: str, function: Any, is_loss: bool) -> bool:
    """Print which properties hold, and return whether a property fails."""
    from arealite.algorithms import properties

    print(f"{name}{inspect.signature(function)}")
    checks: Mapping[str, Callable[[Any, Any], None]] = properties.LOSS_PROPERTIES
    inputs: list[Any] = [properties.random_rows(seed, counts) for seed, counts in enumerate(_SIZES)]
    if not is_loss:
        checks, inputs = properties.ADVANTAGE_PROPERTIES, [properties.random_answers(seed) for seed in range(3)]
    has_failed = False
    for number, (title, check) in enumerate(checks.items()):
        try:
            for rows in inputs:
                check(function, rows)
            print(f"  ok       {title}")
        except Exception as error:
            has_failed = True
            is_found = isinstance(error, properties.Violation)
            problem = str(error) if is_found else f"it must not raise: got {in_one_line(error)}"
            print(f"  FAILED   {title}:\n           {problem}")
            if number == 0:
                print("           The other properties can be tried when this one holds.")
                break
    return has_failed
