"""A training script that stands still in one of six ways; the variable PLANTED names it.

Run by the local launcher from `test_stalls.py`, which finds the guilty lines by their `# guilty` comments. Each imports
what it needs, for six start at once.
"""

import contextlib
import os
import resource
import sys
import time

from arealite.api.cli_args import GRPOConfig, OptimizerConfig, TrainEngineConfig, load_expr_config
from arealite.api.io_struct import FinetuneSpec


def absent_rank(config):
    from arealite.utils.distributed import all_reduce_numbers, join_default_group

    join_default_group(600)
    all_reduce_numbers([1.0])
    if os.environ["RANK"] == "1":
        time.sleep(3600)  # guilty: absent_rank
    all_reduce_numbers([1.0])


def full_disk(config):
    from arealite.engine.fsdp_engine import FSDPEngine
    from arealite.trainer.saver import Saver

    engine = FSDPEngine(TrainEngineConfig(path=config.actor.path, optimizer=OptimizerConfig()))
    engine.initialize(None, FinetuneSpec(1, 8, 8))
    fill(config.cluster.fileroot)
    print("." * 8192, flush=True)  # more than the page of the log that is there already
    Saver(config.saver, FinetuneSpec(1, 8, 8)).save(engine, 0)


def fill(folder):
    """Use up the small disk, or forbid this process to write larger files where there is none."""
    if not os.path.ismount(folder):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
        return
    with open(os.path.join(folder, "ballast"), "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def main(argv):
    config, _ = load_expr_config(argv, GRPOConfig)
    name = os.environ["PLANTED"]
    if name == "absent_rank":
        absent_rank(config)
    elif name == "full_disk":
        full_disk(config)
    else:
        import planted_episodes

        getattr(planted_episodes, name)(config)


if __name__ == "__main__":
    main(sys.argv[1:])
