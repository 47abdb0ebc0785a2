"""Synchronous PPO with a critic as a declared graph: servers wait for every update.

python3 training/main_sync_ppo.py [--config FILE.yaml] key=value ...
"""

import sys

from arealite.api.cli_args import PPOConfig, load_expr_config
from arealite.core.experiments import ppo
from arealite.core.master import Master
from arealite.launcher.start import launched
from arealite.reward import load_rewards
from arealite.workflow.rlvr import RLVRWorkflow


def master(argv: list[str]) -> Master:
    config, _ = load_expr_config(argv, PPOConfig)
    rewards, rollout = load_rewards(config.reward), config.rollout
    limits = {"reward_timeout": rollout.reward_timeout, "num_reward_workers": rollout.reward_workers}
    return Master(config, ppo(config), lambda gconfig, tokenizer: RLVRWorkflow(rewards, gconfig, tokenizer, **limits))


def main(argv: list[str]) -> None:
    master(argv).run()


if __name__ == "__main__":
    sys.exit(launched(__file__, main, check=master))  # an invalid graph is refused before any process starts
