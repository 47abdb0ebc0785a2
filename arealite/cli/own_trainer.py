"""The script of `trainer.type=my_module:MyTrainer`: each rank makes the user's trainer and calls its `train()`.

The class names the config class of its experiment, `config_class = GRPOConfig`, and is made with the loaded config.
"""

import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any

from arealite.api.cli_args import BaseExperimentConfig, load_expr_config
from arealite.api.errors import ConfigError
from arealite.reward.functions import load_named

TYPE = "trainer.type="


def load_trainer(argv: Sequence[str]) -> tuple[Any, BaseExperimentConfig]:
    """Import the class that `trainer.type=` in the arguments names, and return it with its config from the others."""
    (name,) = (word.removeprefix(TYPE) for word in argv if word.startswith(TYPE))
    sys.path += [os.getcwd()] * (os.getcwd() not in sys.path)
    trainer = load_named(name, key="trainer.type", kind="class")
    config_class = getattr(trainer, "config_class", None)
    if not (isinstance(config_class, type) and issubclass(config_class, BaseExperimentConfig)):
        raise ConfigError(
            f"{name} must name the config class of its experiment: got config_class {config_class}. "
            "Write e.g. config_class = GRPOConfig in the class."
        )
    if not callable(getattr(trainer, "train", None)):
        raise ConfigError(f"{name} must have a method train(): got none. Write the loop in it.")
    try:
        inspect.signature(trainer).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{name} must be made with the config alone: {error}. Write __init__(self, config)."
        ) from error
    config, _ = load_expr_config([word for word in argv if not word.startswith(TYPE)], config_class)
    return trainer, config


def main(argv: Sequence[str]) -> None:
    """Run the trainer in this process, one rank of the run."""
    trainer, config = load_trainer(argv)
    trainer(config).train()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: a user's modules may have the same names
    main(sys.argv[1:])
