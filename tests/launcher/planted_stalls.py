"""A training script that stands still in one of six ways; the variable PLANTED names it.

Run by the local launcher from `test_stalls.py`, which finds the guilty lines by their `# guilty` comments.
"""

import asyncio
import contextlib
import os
import pathlib
import resource
import signal
import sys
import threading
import time

from planted_reward import deadlocked_reward
from testing_workflows import IdleEngine, SamplingWorkflow, WaitingWorkflow, waiting_trajectory

from arealite.api.cli_args import GRPOConfig, OptimizerConfig, TrainEngineConfig, load_expr_config
from arealite.api.io_struct import FinetuneSpec, PromptId
from arealite.utils.processes import descendants


def prompts(count):
    return [{"prompt_id": PromptId(0, index), "input_ids": [2, 3, 4]} for index in range(count)]


def run_episodes(config, workflow):
    """Wait for a batch whose episodes need no server."""
    engine = IdleEngine(config.rollout)
    for row in prompts(8):
        engine.executor.submit(row, workflow)
    engine.executor.wait(8)


class Awaiting(WaitingWorkflow):
    async def arun_episode(self, engine, data):
        if data["prompt_id"].index == 5:
            await asyncio.Event().wait()  # guilty: awaits_for_ever
        return waiting_trajectory(data["prompt_id"].index, 0)


class Blocking(WaitingWorkflow):
    async def arun_episode(self, engine, data):
        if data["prompt_id"].index == 5:
            time.sleep(3600)  # guilty: blocking_sleep
        return waiting_trajectory(data["prompt_id"].index, 0)


class Rewarded(WaitingWorkflow):
    def __init__(self):
        from arealite.reward.runner import RewardRunner

        self.reward = RewardRunner(deadlocked_reward, timeout=3600)

    async def arun_episode(self, engine, data):
        await self.reward(prompt="", completions="", prompt_ids=[], completion_ids=[])


def stopped_server(config):
    from arealite.engine.sglang_remote import RemoteSGLangEngine

    engine = RemoteSGLangEngine(config.rollout)
    engine.initialize(None, None)
    workflow = SamplingWorkflow(n_samples=2, max_new_tokens=400, min_new_tokens=400)
    engine.rollout_batch(prompts(2), workflow)
    port = engine.servers.servers[0].address.rpartition(":")[2]
    server = next(pid for pid in descendants(int(os.environ["LAUNCHER"])) if is_server(pid, port))
    threading.Timer(0.3, os.kill, (server, signal.SIGSTOP)).start()
    engine.rollout_batch(prompts(100), workflow)


def is_server(pid, port):
    command = pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return command[1:3] == ["-m", "arealite.server"] and port in command


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
    plant = {
        "awaits_for_ever": lambda: run_episodes(config, Awaiting()),
        "blocking_sleep": lambda: run_episodes(config, Blocking()),
        "reward_deadlock": lambda: run_episodes(config, Rewarded()),
        "stopped_server": lambda: stopped_server(config),
        "absent_rank": lambda: absent_rank(config),
        "full_disk": lambda: full_disk(config),
    }
    plant[os.environ["PLANTED"]]()


if __name__ == "__main__":
    main(sys.argv[1:])
