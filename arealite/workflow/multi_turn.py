"""Several tries: after a wrong answer the model may answer again, for a smaller reward."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.reward_api import RewardFunction
from arealite.workflow.conversation import ChatModel, Conversation
from arealite.workflow.rlvr import RLVRWorkflow
from arealite.workflow.trajectory import sample_group

FEEDBACK = "Your answer is either wrong or not parsable to the reward function. Please try to answer it again."


class MultiTurnWorkflow(RLVRWorkflow):
    """Answers `data["messages"]` up to `max_turns` times, until an answer's reward is at least `goal`.

    A run earns the reward of its last answer times `turn_discount` for each try before it. `feedback` is what the user
    says after a wrong answer, or a function of row and reward that returns it. Metric: `workflow/num_turns`.
    """

    def __init__(
        self,
        reward_fn: RewardFunction | dict[RewardFunction, float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_turns: int = 2,
        turn_discount: float = 0.9,
        *,
        goal: float = 1.0,
        feedback: str | Callable[[dict[str, Any], float], str] = FEEDBACK,
        enable_thinking: bool = False,
        **rewards: Any,
    ) -> None:
        """`rewards` are `reward_timeout` and `num_reward_workers`, as in RLVRWorkflow."""
        super().__init__(reward_fn, gconfig, tokenizer, enable_thinking=enable_thinking, **rewards)
        if max_turns < 1 or not 0 <= turn_discount <= 1:
            raise ValueError(
                "max_turns must be at least 1 and turn_discount from 0 to 1: got "
                f"{max_turns} and {turn_discount}. Use 2 and 0.9."
            )
        self.max_turns, self.turn_discount, self.goal, self.feedback = max_turns, turn_discount, goal, feedback
        self.model = ChatModel(tokenizer, enable_thinking=enable_thinking)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict:
        """Run the group of one prompt."""
        return await sample_group(lambda sample: self._run(engine, data, sample), self.gconfig.n_samples)

    async def _run(self, engine: InferenceEngine, data: dict[str, Any], sample: int) -> TensorDict:
        talk = Conversation(engine, self.model, self.gconfig, sample=sample)
        messages, reward = data["messages"], 0.0
        each: dict[str, torch.Tensor] = {}
        while await talk.ask(messages) is not None:
            reward, each = await self.score(talk.response, data)
            if reward >= self.goal or talk.num_turns == self.max_turns:
                break
            text = self.feedback if isinstance(self.feedback, str) else self.feedback(data, reward)
            messages = [{"role": "user", "content": text}]
        earned = reward * self.turn_discount ** (talk.num_turns - 1)
        trajectory = talk.builder.finish(earned, sample_index=sample).update(each)
        return trajectory.update({"num_turns": torch.tensor([float(talk.num_turns)])})
