"""The graph of PPO with a critic, on engines that only have the methods of the real ones."""

from collections.abc import Callable
from typing import Any

import pytest

from arealite.api.errors import ConfigError
from arealite.core.graph import MFC, DataFlowGraph

TOKENS = ("input_ids", "attention_mask")
ROLLOUT = (*TOKENS, "loss_mask", "logprobs", "versions", "rewards", "group_index", "truncated?")
SCORED = (*ROLLOUT, "proximal_logprobs", "ref_logprobs", "values")
TRAINED = (*SCORED, "advantages", "returns")


class Actor:
    def compute_logprobs(self, batch: Any, *, whole: bool = False) -> None: ...
    def compute_advantages(self, batch: Any) -> None: ...
    def ppo_update(self, batch: Any) -> dict[str, float]:
        return {}


class Critic:
    def compute_values(self, batch: Any) -> None: ...
    def ppo_update(self, batch: Any) -> dict[str, float]:
        return {}


ENGINES: dict[str, type] = {"actor": Actor, "critic": Critic, "ref": Actor}
PPO = {
    call.name: call
    for call in (
        MFC("actor_gen", "rollout", "generate", outputs=ROLLOUT),
        MFC("actor_inf", "actor", "inference", Actor.compute_logprobs, TOKENS, ("proximal_logprobs",)),
        MFC("ref_inf", "ref", "inference", Actor.compute_logprobs, TOKENS, ("ref_logprobs",)),
        MFC("critic_inf", "critic", "inference", Critic.compute_values, TOKENS, ("values",)),
        MFC("advantages", "actor", "inference", Actor.compute_advantages, SCORED, ("advantages", "returns")),
        MFC("actor_train", "actor", "train_step", Actor.ppo_update, TRAINED),
        MFC("critic_train", "critic", "train_step", Critic.ppo_update, TRAINED),
    )
}


def refused(make: Callable[[], object], subject: str, got: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).startswith(f"{subject} must ") and f": got {got}. " in str(error.value)


def ppo() -> DataFlowGraph:
    return DataFlowGraph([*PPO.values()], ENGINES, publishes="actor")
