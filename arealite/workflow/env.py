"""Environments with steps, as in gymnasium: observe, act, get a reward, until the episode ends.

Each run has its own environment. Its failure (an error, a hang, a reward that is not a number, a wrong tuple) is an
EnvError: the runtime counts it and runs the episode again, in new environments.
"""

import asyncio
import hashlib
import inspect
import logging
import math
import numbers
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import torch
from tensordict import TensorDict

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.env_api import Agent
from arealite.api.errors import EnvError, ParseError
from arealite.api.workflow_api import RolloutWorkflow
from arealite.chat.demonstration import stopping
from arealite.utils.background import BackgroundTasks, in_thread
from arealite.workflow.conversation import ChatModel, Conversation
from arealite.workflow.env_process import IsolatedEnv, MakeEnv, env_pool
from arealite.workflow.trajectory import sample_group

logger = logging.getLogger("arealite.workflow")


class EnvWorkflow(RolloutWorkflow):
    """Lets the model act in `make_env(data)`, an environment with `reset(seed=)`, `step(action)` and `close()`.

    Methods run in threads, or are awaited if they are called `areset`, `astep` and `aclose`; with `isolated` they run
    in processes, which end if a call takes longer than `step_timeout` seconds. A run earns the sum of its rewards;
    `turn_rewards` keeps them by turn, for a critic. Samples of a prompt begin with the same seed. `max_envs` bounds the
    environments that are open at once.
    Metrics: `workflow/num_turns`, `workflow/parse_errors`, `workflow/is_terminated`.
    """

    def __init__(
        self,
        agent: Agent,
        make_env: MakeEnv,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        max_turns: int = 32,
        step_timeout: float = 30.0,
        isolated: bool = False,
        turn_rewards: bool = False,
        max_envs: int | None = None,
        enable_thinking: bool = False,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1: got {max_turns}. Use 32.")
        self.agent, self.make_env, self.tokenizer = agent, make_env, tokenizer
        self.gconfig = stopping(gconfig, tokenizer)
        self.max_turns, self.step_timeout, self.turn_rewards = max_turns, step_timeout, turn_rewards
        self.model = ChatModel(tokenizer, enable_thinking=enable_thinking)
        self.pool = env_pool(make_env) if isolated else None
        self._places = asyncio.Semaphore(max_envs or sys.maxsize)
        self._late = BackgroundTasks("the end of an environment that was made past its deadline", logger)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict:
        """Run the group of one prompt, each sample in its own environment."""
        return await sample_group(lambda sample: self._run(engine, data, sample), self.gconfig.n_samples)

    def close(self) -> None:
        """End the environments' processes."""
        if self.pool is not None:
            self.pool.close()

    async def _run(self, engine: InferenceEngine, data: dict[str, Any], sample: int) -> TensorDict:
        talk = Conversation(engine, self.model, self.gconfig, sample=sample)
        total, num_parse_errors, is_terminated, is_truncated = 0.0, 0, False, False
        async with AsyncExitStack() as cleanup:
            await cleanup.enter_async_context(self._places)
            env = await self._make(data)
            cleanup.push_async_callback(self._call, "close", _method(env, "close"))
            observation, info = _checked_reset(await self._call("reset", _method(env, "reset"), seed=_seed(data)))
            messages = self.agent.observe(observation, info)
            while (answer := await talk.ask(messages)) is not None:
                reward = 0.0
                try:
                    stepped = await self._call("step", _method(env, "step"), self.agent.act(answer))
                except ParseError as error:
                    num_parse_errors += 1
                    messages = [{"role": "user", "content": str(error)}]
                else:
                    observation, reward, is_terminated, is_truncated, info = _checked_step(stepped)
                    messages = self.agent.observe(observation, info)
                total += reward
                if self.turn_rewards:
                    talk.builder.earn(reward)
                if is_terminated or is_truncated or talk.num_turns == self.max_turns:
                    break
        metrics = {"num_turns": talk.num_turns, "parse_errors": num_parse_errors, "is_terminated": is_terminated}
        run = talk.builder.finish(total, sample_index=sample)
        return run.update({name: torch.tensor([float(value)]) for name, value in metrics.items()})

    async def _make(self, data: dict[str, Any]) -> Any:
        """Return an environment. If the deadline passes first, close it as soon as it is made."""
        if self.pool is not None:
            return await self._call("make_env", IsolatedEnv.make, self.pool, data)
        making = asyncio.ensure_future(in_thread(self.make_env, data))

        async def made() -> Any:
            return await asyncio.shield(making)

        try:
            return await self._call("make_env", made)
        except BaseException:
            self._late.start(self._close_late(making))
            raise

    async def _close_late(self, making: asyncio.Future[Any]) -> None:
        await asyncio.wait({making})
        if making.exception() is None:
            await self._call("close", _method(making.result(), "close"))

    async def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the environment. Any failure is an EnvError, except a ParseError."""
        try:
            async with asyncio.timeout(self.step_timeout):
                if inspect.iscoroutinefunction(method):
                    return await method(*args, **kwargs)
                return await in_thread(lambda: method(*args, **kwargs))
        except (EnvError, ParseError):
            raise
        except TimeoutError as error:
            raise EnvError(
                f"{name} of the environment must return within step_timeout = {self.step_timeout:g} s: it did not. "
                "Make it faster, or raise the deadline."
            ) from error
        except Exception as error:
            raise EnvError(f"{name} of the environment must not raise: got {type(error).__name__}: {error}.") from error


def _method(env: Any, name: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(env, f"a{name}", None) or getattr(env, name)
    return method


def _seed(data: dict[str, Any]) -> int:
    """Return the seed of a prompt's environments: the row's `seed`, else a hash of the prompt's name."""
    name = str(data.get("prompt_id", 0)).encode()
    return int(data["seed"]) if "seed" in data else int.from_bytes(hashlib.blake2b(name, digest_size=4).digest()) // 2


def _checked_reset(returned: Any) -> tuple[Any, dict[str, Any]]:
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise EnvError(f"reset must return (observation, info): got {returned!r:.200}.")
    return returned


def _checked_step(returned: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    if not (isinstance(returned, tuple) and len(returned) == 5 and isinstance(returned[4], dict)):
        raise EnvError(f"step must return (observation, reward, terminated, truncated, info): got {returned!r:.200}.")
    observation, reward, is_terminated, is_truncated, info = returned
    if not (isinstance(reward, numbers.Real) and math.isfinite(reward)):
        raise EnvError(f"the reward of a step must be a finite number: got {reward!r:.100}.")
    return observation, float(reward), bool(is_terminated), bool(is_truncated), info
