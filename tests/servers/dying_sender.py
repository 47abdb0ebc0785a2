"""Joins a broadcast group as its sender, sends the first bucket, and is gone: `python -m servers.dying_sender`.

It says when it is ready to, and then reads what to do as JSON from stdin.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch

from arealite.utils.weight_transfer import join_group, send_bucket

if __name__ == "__main__":
    print("ready", flush=True)
    plan = json.loads(sys.stdin.readline())
    group = join_group(plan["address"], plan["port"], 0, plan["world_size"], plan["name"], timeout_s=plan["timeout_s"])
    send_bucket(group, [torch.zeros(shape) for shape in plan["shapes"]])
    os.kill(os.getpid(), signal.SIGKILL)
