"""Environments of verifiers and OpenEnv as they are: `arealite train --env ENV --model M`, docs/ecosystem.md.

The rows of `train_dataset.path=verifiers:ENV` are the environment's tasks; its harness asks the policy for turns, and
its rubric's reward ends a run. Those of `openenv:http://HOST:PORT` are seeds; the policy answers the server's
observations, and a run earns the sum of its rewards.
"""

import sys
from typing import Any

import loop

from arealite.agent.verifiers import VerifiersWorkflow
from arealite.api.cli_args import GenerationHyperparameters, GRPOConfig
from arealite.api.config.data import OPENENV
from arealite.api.config.openenv import openenv_server
from arealite.api.workflow_api import RolloutWorkflow
from arealite.workflow.env import EnvWorkflow
from arealite.workflow.openenv import OpenEnv, OpenEnvAgent


def make_workflow(config: GRPOConfig, gconfig: GenerationHyperparameters, tokenizer: Any) -> RolloutWorkflow:
    if (path := config.train_dataset.path).startswith(OPENENV):
        server = openenv_server(path)
        return EnvWorkflow(
            OpenEnvAgent(),
            OpenEnv,
            gconfig,
            tokenizer,
            max_turns=config.agent.max_turns or 32,
            step_timeout=server.step_timeout,
            max_envs=server.sessions,
        )
    return VerifiersWorkflow(gconfig, tokenizer, config=config.agent)


if __name__ == "__main__":
    loop.main(sys.argv[1:], make_workflow)
