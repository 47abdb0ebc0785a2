"""What each rank runs under torchrun in `test_distributed.py`: rank 1 is killed in the first attempt."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from arealite.utils import distributed


def main(folder: Path) -> None:
    is_restarted = int(os.environ["RANK"]) == 0 and distributed.is_restarted()
    distributed.join_default_group(60)
    ones = distributed.all_reduce_numbers([1.0])
    killed = folder / "killed"
    if dist.get_rank() == 1 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        (folder / "result.txt").write_text(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {is_restarted} {ones}")
    distributed.leave_default_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
