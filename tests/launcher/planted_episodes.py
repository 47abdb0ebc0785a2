"""Those of the planted stalls that run episodes."""

import asyncio
import os
import pathlib
import signal
import threading
import time

from planted_reward import deadlocked_reward
from testing_workflows import IdleEngine, SamplingWorkflow, WaitingWorkflow, waiting_trajectory

from arealite.api.io_struct import PromptId
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.reward.runner import RewardRunner
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
        self.reward = RewardRunner(deadlocked_reward, timeout=3600)

    async def arun_episode(self, engine, data):
        await self.reward(prompt="", completions="", prompt_ids=[], completion_ids=[])


def stopped_server(config):
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


def awaits_for_ever(config):
    run_episodes(config, Awaiting())


def blocking_sleep(config):
    run_episodes(config, Blocking())


def reward_deadlock(config):
    run_episodes(config, Rewarded())
