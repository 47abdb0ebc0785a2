"""GRPO of a model that calls functions: it gets their results and answers, and the answer is scored.

    python3 -m arealite.launcher.local train.py --config config.yaml key=value ...

The model gets a function's name, type hints and docstring.
"""

import sys
from typing import Any

import loop

from arealite.api.cli_args import GenerationHyperparameters, GRPOConfig
from arealite.reward import load_rewards
from arealite.workflow.tools import ToolWorkflow


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def subtract(a: int, b: int) -> int:
    """Subtract a number from another number.

    Args:
        a: The number to subtract from.
        b: The number to subtract.
    """
    if b > a:
        raise ValueError("nobody can give away more than there is")  # the model gets this message
    return a - b


def make_workflow(config: GRPOConfig, gconfig: GenerationHyperparameters, tokenizer: Any) -> ToolWorkflow:
    return ToolWorkflow(load_rewards(config.reward), gconfig, tokenizer, [add, subtract], max_turns=3)


if __name__ == "__main__":
    loop.main(sys.argv[1:], make_workflow)
