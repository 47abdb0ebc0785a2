"""Math with a second attempt: after a wrong answer the model gets feedback and tries again for 90 % of the reward.

    python3 -m arealite.launcher.local examples/agents/multi_turn_math.py \
        --config examples/agents/configs/multi_turn_math.yaml key=value ...
"""

import sys
from typing import Any

import loop

from arealite.api.cli_args import GenerationHyperparameters, GRPOConfig
from arealite.reward import load_rewards
from arealite.workflow.multi_turn import MultiTurnWorkflow


def make_workflow(config: GRPOConfig, gconfig: GenerationHyperparameters, tokenizer: Any) -> MultiTurnWorkflow:
    return MultiTurnWorkflow(load_rewards(config.reward), gconfig, tokenizer, max_turns=2, turn_discount=0.9)


if __name__ == "__main__":
    loop.main(sys.argv[1:], make_workflow)
