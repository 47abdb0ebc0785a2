"""Joins a broadcast group as its sender, sends the first bucket, and is gone: `python -m servers.dying_sender JSON`."""

from __future__ import annotations

import json
import os
import signal
import sys

import torch

from arealite.utils.weight_transfer import join_group, send_bucket

if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    group = join_group(plan["address"], plan["port"], 0, plan["world_size"], plan["name"], timeout_s=20)
    send_bucket(group, [torch.zeros(shape) for shape in plan["shapes"]])
    os.kill(os.getpid(), signal.SIGKILL)
