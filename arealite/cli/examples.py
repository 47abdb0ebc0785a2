"""The example scripts, which are the ready-made trainers of `arealite train`, and where they lie."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from arealite.api.config.experiment import EXPERIMENTS
from arealite.api.errors import ConfigError

TRAINERS = {kind: script for experiment in EXPERIMENTS for kind, script in experiment.SCRIPTS.items()}
"""The script of each `trainer.type`."""


def examples_folder() -> Path:
    """Return the examples of the checkout or of the wheel."""
    package = Path(__file__).parents[1]
    for examples in (package.parent / "examples", package / "examples"):
        if (examples / "quickstart").is_dir():
            return examples
    raise ConfigError(f"the examples must lie beside or in the package: got neither at {package}. Reinstall.")


def quickstart_module(name: str) -> ModuleType:
    """Import a module of the quickstart."""
    sys.path.insert(0, str(examples_folder() / "quickstart"))
    return import_module(name)
