"""Environments of verifiers as they are: `arealite train --env ENV --model M`, docs/ecosystem.md.

The rows of `train_dataset.path=verifiers:ENV` are the environment's tasks; its harness asks the policy for turns, and
its rubric's reward ends a run.
"""

import sys
from typing import Any

import loop

from arealite.agent.verifiers import VerifiersWorkflow
from arealite.api.cli_args import GenerationHyperparameters, GRPOConfig


def make_workflow(config: GRPOConfig, gconfig: GenerationHyperparameters, tokenizer: Any) -> VerifiersWorkflow:
    return VerifiersWorkflow(gconfig, tokenizer, config=config.agent)


if __name__ == "__main__":
    loop.main(sys.argv[1:], make_workflow)
