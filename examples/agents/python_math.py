"""Tool-integrated math: the model may run Python programs in a sandbox before it answers.

    python3 -m arealite.launcher.local examples/agents/python_math.py \
        --config examples/agents/configs/python_math.yaml key=value ...

The sandbox is bubblewrap; docs/security.md lists its protections.
"""

import sys
from typing import Any

import loop

from arealite.api.cli_args import GenerationHyperparameters, GRPOConfig
from arealite.reward import load_rewards
from arealite.reward.sandbox import python_tool
from arealite.workflow.tools import ToolWorkflow


def make_workflow(config: GRPOConfig, gconfig: GenerationHyperparameters, tokenizer: Any) -> ToolWorkflow:
    return ToolWorkflow(load_rewards(config.reward), gconfig, tokenizer, [python_tool], max_turns=4)


if __name__ == "__main__":
    loop.main(sys.argv[1:], make_workflow)
