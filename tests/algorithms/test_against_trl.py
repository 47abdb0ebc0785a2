"""Losses of whole steps equal those of TRL's own GRPOTrainer where the two mean the same.

Its `_compute_loss` runs as it is, on an object that has what it reads: logprobs are given instead of a model.
"""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from arealite.algorithms import objectives
from arealite.algorithms.corrections import correction_factors, drifted_completions
from arealite.algorithms.objectives import token_weights
from arealite.algorithms.ratios import kl_losses

B, T, MAX_LENGTH = 6, 8, 20


class OneProcess:
    """An accelerator without peers."""

    num_processes = 1
    sync_gradients = True

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        return tensor


def step(seed: int) -> dict[str, torch.Tensor]:
    """Answers of 1 to 8 tokens without those of an environment, in groups of 2; policies up to a factor of 3 apart."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, proximal, rollout, ref = -3 * torch.rand(4, B, T, generator=generator, dtype=torch.float64)
    batch = {"logprobs": logprobs, "proximal_logprobs": logprobs + 0.5 * (proximal + 1.5)}
    batch |= {"rollout_logprobs": logprobs + 0.5 * (rollout + 1.5), "ref_logprobs": logprobs + 0.5 * (ref + 1.5)}
    lengths = torch.randint(1, T + 1, (B, 1), generator=generator)
    batch["completion_mask"] = torch.arange(T) < lengths
    batch["tool_mask"] = (torch.rand(B, T, generator=generator) < 0.8) | (torch.arange(T) == 0)
    batch["loss_mask"] = batch["completion_mask"] & batch["tool_mask"]
    advantages_B = torch.randn(B, generator=generator, dtype=torch.float64)
    batch["advantages"] = advantages_B[:, None].expand(B, T)
    names = ("proximal_logprobs", "rollout_logprobs", "loss_mask")
    return batch | {"factors": correction_factors(*(batch[name] for name in names), upper=2.0)}


def of_trl(batch: dict[str, torch.Tensor], settings: dict[str, Any]) -> tuple[float, torch.Tensor]:
    logprobs = batch["logprobs"].clone().requires_grad_()
    args = SimpleNamespace(
        delta=settings.get("delta"),
        use_bias_correction_kl=True,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.125,  # exact in float32, in which TRL holds it
        steps_per_generation=1,
    )
    choices = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "use_vllm": False,
        "off_policy_mask_threshold": None,
    }
    trainer = SimpleNamespace(
        **(choices | {key: value for key, value in settings.items() if key != "delta"}),
        args=args,
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        _entropy_bonus_enabled=False,
    )
    ids = torch.zeros(B, T, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones(B, 1, dtype=torch.long),
        "completion_ids": ids,
        "completion_mask": batch["completion_mask"].long(),
        "tool_mask": batch["tool_mask"].long(),
        "advantages": batch["advantages"][:, 0],
        "old_per_token_logps": batch["proximal_logprobs"],
        "sampling_per_token_logps": batch["rollout_logprobs"],
        "ref_per_token_logps": batch["ref_logprobs"],
        "num_items_in_batch": batch["loss_mask"].sum(),
        "importance_sampling_ratio": batch["factors"],
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad


ppo = partial(objectives.ppo, eps_clip=0.2, eps_clip_higher=0.2)
CASES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "grpo": ({"beta": 0.04}, ppo, "sequence_mean"),
    "dr_grpo": ({"loss_type": "dr_grpo"}, ppo, "constant"),
    "dapo": (
        {"loss_type": "dapo", "epsilon_high": 0.28},
        partial(objectives.ppo, eps_clip=0.2, eps_clip_higher=0.28),
        "token_mean",
    ),
    "dual_clip": ({"loss_type": "dapo", "delta": 1.7}, partial(ppo, c_clip=1.7), "token_mean"),
    "gspo": (
        {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
        partial(objectives.ppo, eps_clip=3e-4, eps_clip_higher=4e-4, level="sequence"),
        "sequence_mean",
    ),
    "gspo_wide": (
        {"importance_sampling_level": "sequence", "epsilon_low": 0.3, "epsilon_high": 0.3},
        partial(objectives.ppo, eps_clip=0.3, eps_clip_higher=0.3, level="sequence"),
        "sequence_mean",
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.5},
        partial(objectives.cispo, cispo_max=1.5),
        "token_mean",
    ),
    "sapo": (
        {"loss_type": "sapo"},
        partial(objectives.sapo, tau_positive=1.0, tau_negative=1.125),
        "sequence_mean",
    ),
    "truncated": ({"loss_type": "dapo", "use_vllm": True, "beta": 0.1}, ppo, "token_mean"),
    "drifted": ({"loss_type": "dapo", "off_policy_mask_threshold": 0.02}, ppo, "token_mean"),
}


@pytest.mark.parametrize("seed", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_of_a_step_equal_those_of_trl(case: str, seed: int) -> None:
    settings, objective, aggregation = CASES[case]
    batch = step(seed)
    expected, gradient = of_trl(batch, settings)
    mask = batch["loss_mask"]
    weights = token_weights(mask, torch.arange(B) // 2, B // 2, aggregation=aggregation, loss_constant=MAX_LENGTH)
    factors = batch["factors"] if settings.get("use_vllm") else torch.ones(B, T, dtype=torch.float64)
    if (delta := settings.get("off_policy_mask_threshold")) is not None:
        columns = (batch["logprobs"], batch["rollout_logprobs"], batch["advantages"], mask)
        is_drifted = drifted_completions(*columns, delta=delta)
        assert 0 < is_drifted.sum() < B
        factors = factors * ~is_drifted[:, None]
    logprobs = batch["logprobs"].clone().requires_grad_()
    flat = {name: value.flatten() for name, value in batch.items() if name != "logprobs"}
    flat["segment_ids"] = torch.arange(B).repeat_interleave(T)
    losses, _ = objective(logprobs.flatten(), flat)
    terms = factors.flatten() * losses + settings.get("beta", 0.0) * kl_losses(logprobs.flatten(), flat, estimator="k3")
    loss = (weights.flatten() * terms).sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, gradient, rtol=1e-6, atol=1e-9)
