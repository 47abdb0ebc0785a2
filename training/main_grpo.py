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


def main(argv: list[str]) -> None:
    config, _ = load_expr_config(argv, GRPOConfig)
    rewards = load_rewards(config.reward)
    Master(config, grpo(config), lambda gconfig, tokenizer: RLVRWorkflow(rewards, gconfig, tokenizer)).run()


if __name__ == "__main__":
    sys.exit(launched(__file__, main))
