"""Online: trains on sessions that clients open over HTTP; here the clients play countdown.

    python3 -m arealite.launcher.local examples/agents/online.py \
        --config examples/agents/configs/online.yaml key=value ...

and, any number of times, with the address in the trainer's log:

    AREALITE_SECRET=$(cat runs/online/trial0/.secret) python3 examples/agents/online.py play http://127.0.0.1:8790

A client opens a session, plays, sends the reward, and ends the session. After status 429 it retries later.
"""

import asyncio
import itertools
import os
import sys
from contextlib import ExitStack
from typing import Any

import aiohttp
from countdown_problems import rows, score

from arealite.agent.online import OnlineSessions
from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.api.io_struct import FinetuneSpec
from arealite.api.run_folder import RunFolder
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.trainer.recover import Recover
from arealite.trainer.saver import Saver
from arealite.trainer.stats_logger import StatsLogger
from arealite.utils.hf import load_hf_tokenizer
from arealite.weights.publish import publish_weights

PLAYERS = 8
SAMPLES = 4  # sessions of one problem, at most gconfig.n_samples


def train(argv: list[str], cleanup: ExitStack) -> None:
    config, _ = load_expr_config(argv, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    # Without a data set an epoch is one step.
    batch_size = config.train_dataset.batch_size
    ft_spec = FinetuneSpec(config.total_train_epochs, batch_size, batch_size, config.total_train_steps)
    recover = Recover(config.recover, ft_spec)

    sessions = OnlineSessions(config.gconfig, tokenizer, RunFolder(config.rollout).path, config=config.agent)
    cleanup.callback(sessions.close)
    actor = FSDPPPOActor(config.actor)
    actor.initialize(None, ft_spec)
    cleanup.callback(actor.destroy)
    rollout = RemoteInferenceEngine(config.rollout)
    rollout.initialize(None, ft_spec)
    cleanup.callback(rollout.destroy)
    saver = Saver(config.saver, ft_spec)

    start_step = recover.load(actor, sessions, rollout=rollout, clocks={"saver": saver})
    stats = StatsLogger(config.stats_logger, ft_spec, experiment=config, start_step=start_step)
    cleanup.enter_context(stats)
    cleanup.enter_context(recover)
    publish_weights(actor, rollout, version=start_step)

    for step in range(start_step, ft_spec.total_train_steps):
        with stats.timer("rollout"):
            batch = rollout.prepare_batch(sessions, workflow=sessions)
        with stats.timer("logprobs"):
            batch["proximal_logprobs"] = actor.compute_logprobs(batch)
        with stats.timer("update"):
            actor.compute_advantages(batch)
            stats.add(actor.ppo_update(batch))
        with stats.timer("weights"):
            publish_weights(actor, rollout, version=step + 1)
        saver.save(actor, step, tokenizer=tokenizer)
        stats.add(rollout.metrics() | sessions.metrics())
        stats.commit(step)
        with stats.timer("recover"):
            recover.save(step)

    saver.save(actor, ft_spec.total_train_steps - 1, tokenizer=tokenizer, force=True)
    stats.close()


async def play(address: str) -> None:
    """Run players until the trainer ends."""
    problems = enumerate(itertools.cycle(rows("train", seed=1)))
    secret = {"Authorization": f"Bearer {os.environ['AREALITE_SECRET']}"}
    async with aiohttp.ClientSession(address, timeout=aiohttp.ClientTimeout(600)) as http:

        async def player() -> None:
            for number, problem in problems:
                await asyncio.gather(*(session(f"problem-{number}", problem) for _ in range(SAMPLES)))

        async def session(task_id: str, problem: dict[str, Any]) -> None:
            while True:
                async with http.post("/sessions", json={"task_id": task_id}, headers=secret) as reply:
                    if reply.status == 201:
                        opened = await reply.json()
                        break
                    if reply.status != 429:
                        reply.raise_for_status()
                await asyncio.sleep(float(reply.headers["Retry-After"]))
            key = {"Authorization": f"Bearer {opened['api_key']}"}

            async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
                async with http.post(path, json=body, headers=key) as reply:
                    answer: dict[str, Any] = await reply.json()
                    return answer

            answer = await post("/v1/chat/completions", {"model": "policy", "messages": problem["messages"]})
            if "choices" in answer:  # otherwise the session was dropped
                said = answer["choices"][0]["message"]["content"]
                await post(f"/sessions/{opened['id']}/reward", {"reward": score(said, **problem)})
                await post(f"/sessions/{opened['id']}/end", {})

        try:
            await asyncio.gather(*(player() for _ in range(PLAYERS)))
        except aiohttp.ClientConnectionError:
            print("the trainer has gone")


if __name__ == "__main__":
    if sys.argv[1] == "play":
        asyncio.run(play(sys.argv[2]))
    else:
        with ExitStack() as stack:  # stops everything started below, also after an error
            train(sys.argv[1:], stack)
