"""A stand-in for a GPU: the meta device holds no numbers, so whatever waits for one, or mixes devices, raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from training_cases import actor_config, pair_batch, token_batch, trajectory_batch, write_model

from arealite.algorithms.logprobs import count_loss_tokens
from arealite.api.alloc_mode import ParallelSizes
from arealite.api.cli_args import CorrectionConfig, DPOEngineConfig, MicroBatchSpec
from arealite.api.config.algorithm import PRESETS
from arealite.engine.dpo.dpo_engine import DPOEngine
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.hf_model import build_meta_model, logits_of, return_hidden_states
from arealite.engine.metrics import UpdateCosts
from arealite.engine.optimizer import make_adamw
from arealite.engine.packed_attention import PACKED_SDPA
from arealite.engine.parallel.mesh import Mesh
from arealite.engine.ppo.actor import PPOActor
from arealite.engine.sft.lm_engine import sft_loss_fn

LENGTHS = [9, 4, 12, 3, 7, 11]
NUM_MICRO_BATCHES = 3


class LoopDone(Exception):
    """All micro-batches ran without a number."""


class MetaEngine(FSDPEngine):
    """The engine of one rank, with a whole model on the meta device."""

    def __init__(self, path: str) -> None:
        super().__init__(actor_config(path, mb_spec=MicroBatchSpec(n_mbs=NUM_MICRO_BATCHES)))
        self.device, self._group, self._attention = torch.device("meta"), dist.group.WORLD, PACKED_SDPA
        self.mesh, self._pipeline = Mesh(ParallelSizes(), torch.device("cpu"), timedelta(seconds=60)), None
        self.model: Any = build_meta_model(path, PACKED_SDPA)
        self._outputs = logits_of(self.model)
        return_hidden_states(self.model)
        self.num_forwards = 0
        self.model.set_requires_gradient_sync = self.model.set_requires_all_reduce = lambda _: None
        self.model.register_forward_hook(self._count)
        self.optimizer = make_adamw(self.model.parameters(), self.config.optimizer)
        self.costs = UpdateCosts(self.model, self.device, self.dtype)

    def _count(self, *_: object) -> None:
        self.num_forwards += 1


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetaEngine]:
    def end_of_loop(engine: FSDPEngine, *_: object) -> None:
        """Stand where `train_batch` reads its first number."""
        assert all(parameter.grad is not None for parameter in engine.model.parameters())
        raise LoopDone

    monkeypatch.setattr(FSDPEngine, "_mean_over_ranks", end_of_loop)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield MetaEngine(write_model(tmp_path))
    dist.destroy_process_group()


def assert_no_sync(engine: MetaEngine, train: Callable[[], object]) -> None:
    with pytest.raises(LoopDone):
        train()
    assert engine.num_forwards == NUM_MICRO_BATCHES


ALGORITHMS = sorted(name for name, choices in PRESETS.items() if choices["baseline"] not in ("critic", "teacher"))
CHOICES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name, "kl_ctl": 0.1} for name in ALGORITHMS},
    "decoupled": {"proximal": "recompute", "correction": CorrectionConfig(action="mask", upper=5.0), "c_clip": 3.0},
    "entropy": {"entropy_ctl": 0.1},
    "current": {
        "proximal": "current",
        "correction": CorrectionConfig(action="mask", level="geometric", upper=1.1),
        "sequence_mask_delta": 0.1,
    },
}


@pytest.mark.parametrize("name", CHOICES)
def test_no_micro_batch_of_a_policy_waits_for_a_number(engine: MetaEngine, name: str) -> None:
    actor = PPOActor(actor_config("", ppo_n_minibatches=1, group_size=2, max_new_tokens=10, **CHOICES[name]), engine)
    batch = trajectory_batch(LENGTHS, 2)
    batch["proximal_logprobs"] = batch["ref_logprobs"] = batch["advantages"] = batch["logprobs"]
    assert_no_sync(engine, lambda: actor.ppo_update(batch))


def test_no_micro_batch_of_fine_tuning_waits_for_a_number(engine: MetaEngine) -> None:
    assert_no_sync(engine, lambda: engine.train_batch(token_batch(LENGTHS), sft_loss_fn, count_loss_tokens))


@pytest.mark.parametrize("loss_type", ["dpo", "ipo"])
def test_no_micro_batch_of_pairs_waits_for_a_number(engine: MetaEngine, loss_type: str) -> None:
    batch = pair_batch(4)
    batch["ref_logprobs"] = batch["loss_mask"].float()
    assert_no_sync(engine, lambda: DPOEngine(DPOEngineConfig(path="", loss_type=loss_type), engine).train_dpo(batch))


def test_a_number_that_a_micro_batch_waits_for_is_found(engine: MetaEngine) -> None:
    def loss_fn(logits: Any, micro_batch: TensorDict) -> torch.Tensor:
        loss = sft_loss_fn(logits, micro_batch)
        return loss * loss.item()

    with pytest.raises(RuntimeError, match="meta"):
        engine.train_batch(token_batch(LENGTHS), loss_fn, count_loss_tokens)


def test_no_micro_batch_of_a_forward_pass_waits_for_a_number(engine: MetaEngine) -> None:
    engine.model.reshard = lambda: None
    actor = PPOActor(actor_config(""), engine)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):  # at the end, all at once
        actor.compute_logprobs(trajectory_batch(LENGTHS, 2))
    assert engine.num_forwards == NUM_MICRO_BATCHES
