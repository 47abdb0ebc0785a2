"""A training script that stands still in one of five ways; the variable PLANTED names it.

Run by the local launcher from `test_stalls.py`, which finds the guilty lines by their `# guilty` comments. Each imports
what it needs, for five start at once.
"""

import os
import sys
import time

from arealite.api.cli_args import GRPOConfig, load_expr_config


def absent_rank(config):
    from arealite.utils.distributed import all_reduce_numbers, join_default_group

    join_default_group(600)
    all_reduce_numbers([1.0])
    if os.environ["RANK"] == "1":
        time.sleep(3600)  # guilty: absent_rank
    all_reduce_numbers([1.0])


def main(argv):
    config, _ = load_expr_config(argv, GRPOConfig)
    name = os.environ["PLANTED"]
    if name == "absent_rank":
        absent_rank(config)
    else:
        import planted_episodes

        getattr(planted_episodes, name)(config)


if __name__ == "__main__":
    main(sys.argv[1:])
