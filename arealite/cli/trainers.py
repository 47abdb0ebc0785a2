"""The ready-made trainers of `arealite train`, which are the example scripts, and where these lie."""

from pathlib import Path

from arealite.api.config.experiment import EXPERIMENTS
from arealite.api.errors import ConfigError

TRAINERS = {kind: script for experiment in EXPERIMENTS for kind, script in experiment.SCRIPTS.items()}
"""The script of each `trainer.type`."""


def examples_folder() -> Path:
    """Return the checkout's examples, or those that the wheel carries."""
    package = Path(__file__).parents[1]
    for examples in (package.parent / "examples", package / "examples"):
        if (examples / "quickstart").is_dir():
            return examples
    raise ConfigError(f"the examples must lie beside or in the package: got neither at {package}. Reinstall.")
