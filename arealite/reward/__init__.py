"""Reward functions, one small file per task, and what runs them off the event loop. Nothing here imports torch."""

from arealite.reward.functions import load_rewards
from arealite.reward.gsm8k import gsm8k_reward_fn

__all__ = ["gsm8k_reward_fn", "load_rewards"]
