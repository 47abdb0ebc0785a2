"""On-policy distillation: a policy gradient whose advantages are the teacher's logprobs minus the student's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from training_cases import actor_config, trajectory_batch, write_model

from arealite.api.cli_args import CorrectionConfig
from arealite.engine.ppo.actor import FSDPPPOActor

CORRECTION = CorrectionConfig(action="mask", upper=5.0)  # so that the sampling policy is the server's, not the student
CHOICES = {"algorithm": "opd", "proximal": "recompute", "ppo_n_minibatches": 1, "correction": CORRECTION}


@pytest.fixture
def actors(start: Callable[..., Any], lm_path: str, tmp_path: Path) -> list[FSDPPPOActor]:
    """A student and a teacher."""
    student = FSDPPPOActor(actor_config(lm_path, **CHOICES))
    return [start(student), start(FSDPPPOActor(actor_config(write_model(tmp_path, seed=1), optimizer=None)))]


def distil(student: FSDPPPOActor, teacher: FSDPPPOActor, batch: TensorDict) -> dict[str, float]:
    batch["proximal_logprobs"] = student.compute_logprobs(batch)
    batch["teacher_logprobs"] = teacher.compute_logprobs(batch)
    student.compute_advantages(batch)
    return student.ppo_update(batch)


def test_a_teacher_equal_to_the_student_teaches_nothing(actors: list[FSDPPPOActor]) -> None:
    student, _ = actors
    batch, before = trajectory_batch([9, 4, 7], group_size=1), student.fingerprint()
    metrics = distil(student, student, batch)
    assert not batch["advantages"].any()
    assert metrics["policy/teacher_kl"] == metrics["optim/grad_norm"] == 0 and student.fingerprint() == before


def test_advantages_are_log_ratios_of_trained_tokens_whatever_rewards_say(actors: list[FSDPPPOActor]) -> None:
    student, teacher = actors
    batch = trajectory_batch([9, 4, 7], group_size=1)
    batch["rewards"] += 100
    metrics = distil(student, teacher, batch)
    mask = batch["loss_mask"].bool()
    gaps = batch["teacher_logprobs"] - batch["proximal_logprobs"]
    assert torch.equal(batch["advantages"], torch.where(mask, gaps, 0.0).clamp(-20, 20))
    assert metrics["policy/teacher_kl"] == pytest.approx(-batch["advantages"][mask].mean().item(), abs=1e-6)
    without = trajectory_batch([9, 4], group_size=1)
    with pytest.raises(ValueError, match="must have 'teacher_logprobs' with baseline: teacher"):
        student.compute_advantages(without)
    without["teacher_logprobs"] = torch.zeros_like(without["logprobs"])
    student.compute_advantages(without)  # without recomputed logprobs, the server's count as the student's
    assert torch.equal(without["advantages"], -without["logprobs"])
