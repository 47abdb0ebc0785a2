"""`arealite check-loss`: tries a user's loss on the properties that every loss must have."""

import argparse
import runpy
from collections.abc import Callable
from inspect import isfunction, signature
from pathlib import Path
from typing import Any

from arealite.api.errors import ConfigError
from arealite.api.script import in_one_line, running


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "arealite check-loss FILE.py[:FUNCTION]"
    parser.description = (
        "Call a loss (logprobs, micro_batch) on small inputs, on a CPU, and show by how much a property fails, and on "
        "which input."
    )
    parser.epilog = "exit status: 0 all properties hold, 1 one fails, 2 the file can't be used"
    parser.add_argument(
        "function", metavar="FILE.py[:FUNCTION]", help="default: every function whose first argument is logprobs"
    )


def run(args: argparse.Namespace) -> int:
    """Check `FILE.py:FUNCTION`, or all fitting functions of `FILE.py`; return 0 if all properties hold, else 1."""
    file, _, name = args.function.partition(":")
    script = Path(file).expanduser()
    with running(script):
        try:
            names = runpy.run_path(str(script), run_name="__mp_main__")
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{script} must run as far as its functions: got {in_one_line(error)}. Correct it."
            ) from error
        own = [key for key, value in names.items() if getattr(value, "__module__", "") == "__mp_main__"]
        losses = [key for key in ([name] if name else own) if _is_loss(names.get(key))]
        if not losses:
            defined = ", ".join(key for key, value in names.items() if isfunction(value)) or "none"
            wanted = f"{name} whose first argument is logprobs".lstrip()
            raise ConfigError(f"{script} must have a function {wanted}: got {defined}. Name one: {script}:FUNCTION.")
        return max([_fails(key, names[key]) for key in losses])


def _is_loss(value: Any) -> bool:
    return callable(value) and not isinstance(value, type) and [*signature(value).parameters][:1] == ["logprobs"]


def _fails(name: str, loss_fn: Callable[..., Any]) -> bool:
    """Print which properties hold, and return whether one fails."""
    from arealite.algorithms.properties import LOSS_PROPERTIES, Violation, check_form, on_small_inputs

    print(f"{name}{signature(loss_fn)}")
    has_failed = False
    for title, check in LOSS_PROPERTIES.items():
        try:
            on_small_inputs(check, loss_fn)
        except Exception as error:
            has_failed = True
            problem = str(error) if isinstance(error, Violation) else f"it must not raise: got {in_one_line(error)}"
            print(f"  FAILED   {title}:\n           {problem}")
            if check is check_form:  # the others need it
                break
        else:
            print(f"  ok       {title}")
    return has_failed
