"""On-policy distillation: a policy gradient whose advantages are the teacher's logprobs minus the student's."""

from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict
from training_cases import OPTIMIZER, VOCABULARY, actor_config, trajectory_batch, write_model

from arealite.api.cli_args import CorrectionConfig, OptimizerConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.ppo.actor import FSDPPPOActor

torch.set_num_threads(1)
CORRECTION = CorrectionConfig(action="mask", upper=5.0)  # so that the sampling policy is the server's, not the student
CHOICES = {"algorithm": "opd", "proximal": "recompute", "ppo_n_minibatches": 1, "correction": CORRECTION}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [write_model(tmp_path_factory.mktemp(f"model{seed}"), seed=seed) for seed in (0, 1)]


@pytest.fixture
def actors(paths: list[str]) -> Iterator[tuple[FSDPPPOActor, FSDPPPOActor]]:
    """A student and a teacher."""
    optimizer = OptimizerConfig(**OPTIMIZER | {"lr": 5e-3})
    student = FSDPPPOActor(actor_config(paths[0], optimizer=optimizer, **CHOICES))
    teacher = FSDPPPOActor(actor_config(paths[1], optimizer=None))
    for one in (student, teacher):
        one.initialize(None, FinetuneSpec(1, 100, 1))
    yield student, teacher
    for one in (student, teacher):
        one.destroy()


def distil(student: FSDPPPOActor, teacher: FSDPPPOActor, batch: TensorDict) -> dict[str, float]:
    batch["proximal_logprobs"] = student.compute_logprobs(batch)
    batch["teacher_logprobs"] = teacher.compute_logprobs(batch)
    student.compute_advantages(batch)
    return student.ppo_update(batch)


def test_a_teacher_equal_to_the_student_teaches_nothing(actors: tuple[FSDPPPOActor, FSDPPPOActor]) -> None:
    student, _ = actors
    batch, before = trajectory_batch([9, 4, 7], group_size=1), student.fingerprint()
    metrics = distil(student, student, batch)
    assert not batch["advantages"].any()
    assert metrics["policy/teacher_kl"] == metrics["optim/grad_norm"] == 0 and student.fingerprint() == before


def test_advantages_are_log_ratios_of_trained_tokens_whatever_rewards_say(
    actors: tuple[FSDPPPOActor, FSDPPPOActor],
) -> None:
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


def distribution(actor: FSDPPPOActor) -> torch.Tensor:
    """Return the logprobs `[V]` of every third token after a fixed prompt."""
    tokens = torch.arange(VOCABULARY)
    ids = torch.stack([torch.full_like(tokens, 5), torch.full_like(tokens, 7), tokens], dim=1)
    batch = TensorDict({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, batch_size=[VOCABULARY])
    return actor.compute_logprobs(batch)[:, 2]


def test_the_divergence_from_the_teacher_falls(actors: tuple[FSDPPPOActor, FSDPPPOActor]) -> None:
    """On-policy: each batch is sampled from the student as it is."""
    student, teacher = actors
    aim = distribution(teacher)
    divergences = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        logprobs = distribution(student)
        divergences.append((logprobs.exp() * (logprobs - aim)).sum().item())
        drawn = torch.multinomial(logprobs.exp(), 128, replacement=True, generator=generator)
        batch = trajectory_batch([3] * 128, group_size=1)
        batch["input_ids"] = torch.stack([torch.full_like(drawn, 5), torch.full_like(drawn, 7), drawn], dim=1)
        batch["logprobs"][:, 2] = logprobs[drawn]
        metrics = distil(student, teacher, batch)
        assert metrics["policy/teacher_kl"] == pytest.approx(divergences[-1], abs=1.0)
    assert divergences[0] > 1.0 and divergences[-1] < 0.15 * divergences[0], divergences
