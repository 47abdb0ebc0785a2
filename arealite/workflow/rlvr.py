"""Reinforcement learning with verifiable rewards: one prompt, a group of completions, a reward function.

The group is sampled concurrently, and each completion is scored when it ends. If one fails, the others are cancelled
and the episode fails with the original error: a group is trained on as a whole or not at all.
"""

# B = 1 sequence, S tokens

import asyncio
import itertools
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError, TrajectoryError
from arealite.api.io_struct import ModelRequest, ModelResponse
from arealite.api.reward_api import RewardFunction
from arealite.api.workflow_api import RolloutWorkflow
from arealite.reward.functions import check_signature
from arealite.reward.runner import RewardRunner
from arealite.utils.chat_template import prompt_tokens
from arealite.utils.tensors import concat_padded_tensors

_NOT_FOR_REWARDS = {"prompt_id", "messages", "prompt", "completions", "prompt_ids", "completion_ids"}


class RLVRWorkflow(RolloutWorkflow):
    """Samples `gconfig.n_samples` completions of `data["messages"]` and scores each with `reward_fn`.

    A reward function gets `prompt` (as rendered by the chat template), `completions` (the text of one completion
    without special tokens), `prompt_ids`, `completion_ids`, and the data set's columns other than `messages` by name.
    With several and their weights, `{correct: 1.0, brief: 0.1}`, the reward is the weighted sum, and the mean of each
    is logged as `rewards/<name>`.
    """

    def __init__(
        self,
        reward_fn: RewardFunction | Mapping[RewardFunction, float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool = False,
        reward_timeout: float = 15.0,
        num_reward_workers: int = 2,
    ) -> None:
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.enable_thinking = enable_thinking
        weights = reward_fn if isinstance(reward_fn, Mapping) else {reward_fn: 1.0}
        for one in weights:
            check_signature(one)
        self.rewards = {
            RewardRunner(one, timeout=reward_timeout, num_workers=num_reward_workers): weight
            for one, weight in weights.items()
        }
        if len({runner.name for runner in self.rewards}) < len(self.rewards) or not self.rewards:
            names = [runner.name for runner in self.rewards]
            raise ConfigError(f"reward functions must have names of their own: got {names}. Rename one.")

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict:
        """Sample and score the group of one prompt."""
        (prompt_ids,) = prompt_tokens(self.tokenizer, [data["messages"]], enable_thinking=self.enable_thinking)
        request = ModelRequest(prompt_ids, self.gconfig.new(n_samples=1), rid=uuid.uuid4().hex)
        prompt = self.tokenizer.decode(prompt_ids)
        samples = [
            asyncio.create_task(self._sample(engine, request, data, prompt)) for _ in range(self.gconfig.n_samples)
        ]
        try:
            return concat_padded_tensors(await asyncio.gather(*samples))
        finally:
            for sample in samples:
                sample.cancel()

    def close(self) -> None:
        """End the reward function's processes."""
        for runner in self.rewards:
            runner.close()

    async def score(
        self, response: ModelResponse, data: dict[str, Any], prompt: str | None = None
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the reward of a completion and, if there are several functions, what each says as a metric `[1]`."""
        call = {
            **reward_columns(data),
            "prompt": self.tokenizer.decode(response.input_tokens) if prompt is None else prompt,
            "completions": self.tokenizer.decode(response.output_tokens, skip_special_tokens=True),
            "prompt_ids": response.input_tokens,
            "completion_ids": response.output_tokens,
        }
        scores = {runner: await runner(**call) for runner in self.rewards}
        reward = sum(weight * scores[runner] for runner, weight in self.rewards.items())
        each = {f"rewards/{runner.name}": torch.tensor([scores[runner]]) for runner in scores}
        return reward, each if len(each) > 1 else {}

    async def _sample(
        self, engine: InferenceEngine, request: ModelRequest, data: dict[str, Any], prompt: str
    ) -> TensorDict:
        response = await engine.agenerate(request)
        reward, each = await self.score(response, data, prompt)
        return trajectory_from_response(response, reward).update(each)


def reward_columns(data: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that a reward function gets by name."""
    return {key: value for key, value in data.items() if key not in _NOT_FOR_REWARDS}


def trajectory_from_response(response: ModelResponse, reward: float) -> TensorDict:
    """Return one completion as a trajectory with a single row: tensors `[1, S]`, rewards and no_eos `[1]`."""
    return trajectory_from_turns([response], reward)


def trajectory_from_turns(turns: Sequence[ModelResponse], reward: float) -> TensorDict:
    """Return a conversation as a trajectory with a single row, in which only what was sampled is trained on."""
    ids: list[int] = []
    loss_mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    kept: list[list[int]] = []
    for number, turn in enumerate(turns, start=1):
        if turn.input_tokens[: len(ids)] != ids:
            raise TrajectoryError(
                "the prompt of a turn must begin with the tokens of the turns before it: got others in turn "
                f"{number}. Make it with arealite.utils.chat_template.next_prompt."
            )
        num_given, ids = turn.input_len - len(ids), turn.input_tokens + turn.output_tokens
        loss_mask += [0] * num_given + [1] * turn.output_len
        logprobs += [0.0] * num_given + turn.output_logprobs
        versions += [-1] * num_given + turn.output_versions
        kept += [[]] * num_given + (turn.output_kept or [])
    trajectory = {
        "input_ids": _tensor([ids], np.int64),
        "attention_mask": _tensor([[True] * len(ids)], np.bool_),
        "loss_mask": _tensor([loss_mask], np.int64),
        "logprobs": _tensor([logprobs], np.float32),
        "versions": _tensor([versions], np.int64),
        "rewards": _tensor([reward], np.float32),
        "no_eos": _tensor([turns[-1].stop_reason == "length"], np.bool_),
    }
    if all(turn.output_kept is not None for turn in turns):
        trajectory["kept_counts"] = _tensor([list(map(len, kept))], np.int32)
        trajectory["kept_ids"] = _tensor([list(itertools.chain(*kept))], np.int32)
    return TensorDict(trajectory, batch_size=[1])


def _tensor(values: list[Any], dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype))  # numpy reads lists faster than torch
