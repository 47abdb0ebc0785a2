"""Graphs of the experiments that have example scripts: GRPO, PPO with a critic, supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arealite.core.graph import MFC, DataFlowGraph
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.ppo.critic import FSDPPPOCritic
from arealite.engine.sft.lm_engine import FSDPLMEngine

if TYPE_CHECKING:
    from tensordict import TensorDict

    from arealite.api.cli_args import GRPOConfig, PPOConfig

INPUTS = ("input_ids", "attention_mask", "pixel_values?", "image_grid_thw?")
TOKENS = (*INPUTS, "kept_ids?", "kept_counts?")
RUNS = ("group_index", "sample_index?", "turn_rewards?")
ROLLOUT = (*TOKENS, "loss_mask", "logprobs", "versions", "rewards", "no_eos?", *RUNS)


def grpo(config: GRPOConfig) -> DataFlowGraph:
    """Return the graph of `gsm8k_grpo.py`: the inferences that the algorithm needs, and the policy's update."""
    calls, engines = _before_advantages(config)
    return DataFlowGraph([*calls, *_policy(calls, ())], engines, publishes="actor")


def ppo(config: PPOConfig) -> DataFlowGraph:
    """Return the graph of `gsm8k_ppo.py`: `grpo` and a critic, whose update runs in parallel to the policy's."""
    calls, engines = _before_advantages(config)
    calls += [MFC("critic_inf", "critic", "inference", FSDPPPOCritic.compute_values, INPUTS[:2], ("values",))]
    targets = ("returns", "returns_mask")
    policy = _policy(calls, targets, warmup_steps=config.critic_warmup_steps)
    keys = (*INPUTS[:2], "group_index", "values", *targets)
    critic = MFC("critic_train", "critic", "train_step", FSDPPPOCritic.ppo_update, keys)
    return DataFlowGraph([*calls, *policy, critic], {**engines, "critic": FSDPPPOCritic}, publishes="actor")


def sft() -> DataFlowGraph:
    """Return the graph of `gsm8k_sft.py`."""
    keys = ("input_ids", "attention_mask", "loss_mask")
    calls = [
        MFC("data", "data", "generate", outputs=keys),
        MFC("train", "model", "train_step", FSDPLMEngine.train_lm, keys),
    ]
    return DataFlowGraph(calls, {"model": FSDPLMEngine}, publishes="model")


def _before_advantages(config: GRPOConfig) -> tuple[list[MFC], dict[str, type]]:
    """Return the source of episodes and the inferences of the policy and frozen models, with the engines."""
    logprobs = FSDPPPOActor.compute_logprobs
    calls = [MFC("actor_gen", "rollout", "generate", outputs=ROLLOUT)]
    engines: dict[str, type] = {"actor": FSDPPPOActor}
    if config.actor.proximal == "recompute":
        calls += [MFC("actor_inf", "actor", "inference", logprobs, TOKENS, ("proximal_logprobs",))]
    for role in ("ref", "teacher"):
        if getattr(config, role) is not None:
            calls += [MFC(f"{role}_inf", role, "inference", logprobs, INPUTS, (f"{role}_logprobs",))]
            engines[role] = FSDPPPOActor
    return calls, engines


def _policy(calls: list[MFC], targets: tuple[str, ...], *, warmup_steps: int = 0) -> list[MFC]:
    """Return the advantages and the policy's update, which read all outputs of `calls`; `targets` are the critic's."""
    made = tuple(key for call in calls for key in call.outputs)
    advantages, inferred = FSDPPPOActor.compute_advantages, ("advantages", "whole_logprobs?")
    warmup = {"warmup_steps": warmup_steps}
    return [
        MFC("advantages", "actor", "inference", advantages, made, (*inferred, *targets)),
        MFC("actor_train", "actor", "train_step", update, (*made, *inferred), kwargs=warmup),
    ]


def update(actor: FSDPPPOActor, batch: TensorDict, *, warmup_steps: int) -> dict[str, float]:
    """Update the policy; while the critic warms up, only return the metrics of the batch."""
    is_warm = actor.get_version() >= warmup_steps
    return actor.ppo_update(batch) if is_warm else actor.describe(batch)
