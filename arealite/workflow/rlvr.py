"""Reinforcement learning with verifiable rewards: one prompt, a group of completions, a reward function.

The group is sampled concurrently, and each completion is scored when it ends. If one fails, the others are cancelled
and the episode fails with the original error: a group is trained on as a whole or not at all.
"""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError
from arealite.api.io_struct import ModelRequest, ModelResponse
from arealite.api.reward_api import RewardFunction
from arealite.api.workflow_api import RolloutWorkflow
from arealite.chat.demonstration import stopping
from arealite.chat.template import prompt_tokens
from arealite.reward.functions import check_names, check_signature
from arealite.reward.runner import RewardRunner
from arealite.workflow.trajectory import sample_group, trajectory_from_response

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
        self.gconfig = stopping(gconfig, tokenizer)
        self.tokenizer = tokenizer
        self.enable_thinking = enable_thinking
        weights = reward_fn if isinstance(reward_fn, Mapping) else {reward_fn: 1.0}
        if not weights:
            raise ConfigError("reward_fn must have a function: got none. Name one, e.g. by the key reward.")
        for function in weights:
            check_signature(function)
        check_names(weights)
        runners = [RewardRunner(function, reward_timeout, num_reward_workers) for function in weights]
        self.rewards = dict(zip(runners, weights.values(), strict=True))

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict:
        """Sample and score the group of one prompt."""
        (prompt_ids,) = prompt_tokens(self.tokenizer, [data["messages"]], enable_thinking=self.enable_thinking)
        request = ModelRequest(prompt_ids, self.gconfig.new(n_samples=1))
        prompt = self.tokenizer.decode(prompt_ids)
        return await sample_group(lambda _: self._sample(engine, request, data, prompt), self.gconfig.n_samples)

    def close(self) -> None:
        """End the reward function's processes."""
        for runner in self.rewards:
            runner.close()

    async def score(
        self, response: ModelResponse, data: dict[str, Any], prompt: str | None = None
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the reward of a completion and, with several functions, the score of each as a metric `[1]`."""
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
