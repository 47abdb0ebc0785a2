"""Supervised fine-tuning as a declared graph.

python3 training/main_sft.py [--config FILE.yaml] key=value ...
"""

import sys

from arealite.api.cli_args import SFTConfig, load_expr_config
from arealite.core.experiments import sft
from arealite.core.master import Master
from arealite.launcher.start import launched


def master(argv: list[str]) -> Master:
    config, _ = load_expr_config(argv, SFTConfig)
    return Master(config, sft())


def main(argv: list[str]) -> None:
    master(argv).run()


if __name__ == "__main__":
    sys.exit(launched(__file__, main, check=master))  # an invalid graph is refused before any process starts
