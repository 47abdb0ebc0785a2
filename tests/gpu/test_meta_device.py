"""A stand-in for a GPU: the meta device holds no numbers, so whatever waits for one, or mixes devices, raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from training_cases import actor_config, trajectory_batch, write_model

from arealite.engine.hf_model import build_meta_model
from arealite.engine.output_layer import logits_of, return_hidden_states
from arealite.engine.packed_attention import PACKED_SDPA, sequence_bounds
from arealite.engine.ppo.actor import PPOActor
from arealite.engine.sft.lm_engine import sft_loss_fn
from arealite.utils.tensors import pack_rows


class PassDone(Exception):
    """Forward and backward pass ended without a number."""


class MetaEngine:
    """Runs one forward and backward pass of one micro-batch on the meta device."""

    def __init__(self, path: str) -> None:
        self.model = build_meta_model(path, PACKED_SDPA)
        self.outputs = logits_of(self.model)
        return_hidden_states(self.model)
        self.parallelism_group = dist.group.WORLD

    def train(self) -> None:
        self.model.train()

    def train_batch(self, batch: TensorDict, loss_fn: Callable[..., torch.Tensor], _: object) -> None:
        lengths = batch["attention_mask"].bool().sum(dim=1).tolist()
        packed = pack_rows(batch, range(len(lengths))).packed.to("meta")
        ids, positions = packed["input_ids"][None], packed["position_ids"][None]
        bounds = sequence_bounds(PACKED_SDPA, lengths, torch.device("meta"))
        hidden = self.model(input_ids=ids, position_ids=positions, use_cache=False, **bounds)
        loss_fn(self.outputs(hidden[0]), packed).backward()
        assert all(parameter.grad is not None for parameter in self.model.parameters())
        raise PassDone


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[MetaEngine]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield MetaEngine(write_model(tmp_path))
    dist.destroy_process_group()


@pytest.mark.parametrize("c_clip", [None, 3.0])
def test_the_loss_of_a_policy_and_its_statistics_wait_for_no_number(engine: MetaEngine, c_clip: float | None) -> None:
    config = actor_config("", ppo_n_minibatches=1, use_decoupled_loss=True, behav_imp_weight_cap=5.0, c_clip=c_clip)
    batch = trajectory_batch([9, 4, 12, 3], 2)
    batch["proximal_logprobs"] = batch["advantages"] = batch["logprobs"]
    with pytest.raises(PassDone):
        PPOActor(config, engine).ppo_update(batch)


def test_the_loss_of_fine_tuning_waits_for_no_number(engine: MetaEngine) -> None:
    with pytest.raises(PassDone):
        engine.train_batch(trajectory_batch([9, 4, 12, 3], 2), sft_loss_fn, None)
