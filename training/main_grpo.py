"""GRPO as a declared graph.

python3 training/main_grpo.py [--config FILE.yaml] key=value ...
"""

import sys

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.core.experiments import grpo
from arealite.core.master import Master
from arealite.launcher.start import launched
from arealite.reward import load_rewards
from arealite.workflow.rlvr import RLVRWorkflow


def master(argv: list[str]) -> Master:
    config, _ = load_expr_config(argv, GRPOConfig)
    rewards, rollout = load_rewards(config.reward), config.rollout
    limits = {"reward_timeout": rollout.reward_timeout, "num_reward_workers": rollout.reward_workers}
    return Master(config, grpo(config), lambda gconfig, tokenizer: RLVRWorkflow(rewards, gconfig, tokenizer, **limits))


def main(argv: list[str]) -> None:
    master(argv).run()


if __name__ == "__main__":
    sys.exit(launched(__file__, main, check=master))  # an invalid graph is refused before any process starts
