"""Countdown: combine numbers by + - * / to reach a target. After a wrong attempt the model gets its result.

    python3 -m arealite.launcher.local examples/agents/countdown.py \
        --config examples/agents/configs/countdown.yaml key=value ...
"""

import sys
from typing import Any

import loop
from countdown_problems import feedback, score

from arealite.api.cli_args import GenerationHyperparameters, GRPOConfig
from arealite.workflow.multi_turn import MultiTurnWorkflow


def make_workflow(config: GRPOConfig, gconfig: GenerationHyperparameters, tokenizer: Any) -> MultiTurnWorkflow:
    return MultiTurnWorkflow(score, gconfig, tokenizer, max_turns=3, turn_discount=0.9, feedback=feedback)


if __name__ == "__main__":
    loop.main(sys.argv[1:], make_workflow)
