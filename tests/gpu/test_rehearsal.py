"""The code of a GPU on tensors without numbers (`fake_cuda`): it runs, and no loop waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import CUDA, FakeCuda, fake_cuda
from tensordict import TensorDict
from training_cases import (
    SPEC,
    VOCABULARY,
    actor_config,
    pair_batch,
    token_batch,
    train_config,
    trajectory_batch,
    write_model,
)
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from arealite.algorithms.logprobs import LazyLogits, count_loss_tokens
from arealite.api.cli_args import CorrectionConfig, DPOEngineConfig, LoRAConfig, OptimizerConfig
from arealite.api.config.algorithm import PRESETS
from arealite.engine.dpo.dpo_engine import DPOEngine
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.hf_model import iter_full_params
from arealite.engine.packed_attention import PACKED_VARLEN
from arealite.engine.ppo.actor import PPOActor
from arealite.engine.sft.lm_engine import sft_loss_fn
from arealite.generation.model_runner import DecodeGraphs, ModelRunner
from arealite.generation.request import SamplingParams
from arealite.generation.sampler import SamplingRows, sample

pytestmark = [
    pytest.mark.xdist_group("rehearsal"),  # one worker holds the engine that they share
    pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU rehearses"),
]
LENGTHS = [9, 4, 12, 3, 7, 11]
OF_A_STEP = ["engine/fsdp_engine.py:FSDPEngine._mean_over_ranks", "engine/parallel/shards.py:clip_gradients"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


def started(cuda: FakeCuda, path: str, **changes: Any) -> FSDPEngine:
    """Return the engine of rank 0; what its start has waited for is forgotten."""
    engine = FSDPEngine(train_config(path, **{"dtype": "bfloat16", "gradient_checkpointing": True} | changes))
    cuda.has_model = False
    engine.initialize(None, SPEC)
    cuda.has_model = True
    cuda.waits.clear()
    return engine


@pytest.fixture(scope="module")
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda(8) as mode:
        yield mode


@pytest.fixture(scope="module")
def shared(cuda: FakeCuda, path: str) -> tuple[FakeCuda, FSDPEngine]:
    return cuda, started(cuda, path, n_mbs=3)


def waits(shared: tuple[FakeCuda, FSDPEngine], run: Callable[[FSDPEngine], object]) -> list[str]:
    """Return where three micro-batches waited for the device."""
    cuda, engine = shared
    cuda.waits.clear()
    run(engine)
    return cuda.waits.copy()


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
def test_no_micro_batch_of_a_policy_waits(shared: tuple[FakeCuda, FSDPEngine], name: str) -> None:
    config = actor_config("", ppo_n_minibatches=1, group_size=2, max_new_tokens=10, **CHOICES[name])
    batch = trajectory_batch(LENGTHS, 2)
    batch["proximal_logprobs"] = batch["ref_logprobs"] = batch["advantages"] = batch["logprobs"]
    found = waits(shared, lambda engine: PPOActor(config, engine).ppo_update(batch))
    assert found[:2] == OF_A_STEP
    assert set(found[2:]) == {"engine/metrics.py:MaskedMetrics.reduce"}


def test_no_micro_batch_of_fine_tuning_waits(shared: tuple[FakeCuda, FSDPEngine]) -> None:
    batch = token_batch(LENGTHS)
    assert waits(shared, lambda engine: engine.train_batch(batch, sft_loss_fn, count_loss_tokens)) == OF_A_STEP
    once = waits(shared, lambda engine: engine.eval_batch(batch, sft_loss_fn, count_loss_tokens))
    assert once == OF_A_STEP[:1]


@pytest.mark.parametrize("loss_type", ["dpo", "ipo"])
def test_no_micro_batch_of_pairs_waits(shared: tuple[FakeCuda, FSDPEngine], loss_type: str) -> None:
    batch, config = pair_batch(4), DPOEngineConfig(path="", loss_type=loss_type)
    batch["ref_logprobs"] = batch["loss_mask"].float()
    found = waits(shared, lambda engine: DPOEngine(config, engine).train_dpo(batch))
    assert found[:2] == OF_A_STEP
    assert set(found[2:]) == {"engine/metrics.py:MaskedMetrics.reduce"}


def test_logprobs_come_back_at_once(shared: tuple[FakeCuda, FSDPEngine]) -> None:
    actor = PPOActor(actor_config(""), shared[1])
    found = waits(shared, lambda _: actor.compute_logprobs(trajectory_batch(LENGTHS, 2)))
    assert found == ["utils/tensors.py:unpack_rows"]


def test_the_attention_is_that_of_a_gpu(shared: tuple[FakeCuda, FSDPEngine]) -> None:
    engine = shared[1]
    assert (engine.device, engine._attention) == (CUDA, PACKED_VARLEN)
    assert {parameter.device for parameter in engine.model.parameters()} == {CUDA}
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "it builds a plan for each length"


def test_weights_are_gathered_without_a_wait(shared: tuple[FakeCuda, FSDPEngine]) -> None:
    engine = shared[1]
    names = {spec.name for bucket in engine.get_param_specs() for spec in bucket}
    assert waits(shared, lambda _: names.difference_update(name for name, _ in _sent(engine))) == []
    assert names == set()


def _sent(engine: FSDPEngine) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in iter_full_params(engine.model, engine.dtype):
        assert (tensor.device, tensor.dtype) == (CUDA, torch.bfloat16)
        yield name, tensor


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
}
OTHERS: dict[str, dict[str, Any]] = {
    "tensor and context": {"parallel": "d2t2c2"},
    "pipeline": {"parallel": "d4p2", "n_mbs": 2},
    "adapters": {"lora": LoRAConfig(rank=2)},
    "options": {"cast_lm_head_to_fp32": True, "optimizer": OptimizerConfig(type="adam_bf16")},
    "float32": {"dtype": "float32"},  # for which FlashAttention has no kernel
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_step_of_other_layouts_and_options_waits_no_more(cuda: FakeCuda, tmp_path: Path, name: str) -> None:
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(tmp_path)
    engine = started(cuda, str(tmp_path), **{"n_mbs": 3} | OTHERS[name])
    result = engine.train_batch(token_batch(LENGTHS), sft_loss_fn, count_loss_tokens)
    assert result["update_successful"] == 1.0
    losses = ["engine/parallel/pipeline.py:Pipeline.run"] * 2  # after the last stage's last micro-batch
    assert cuda.waits == ([*losses, OF_A_STEP[1]] if name == "pipeline" else OF_A_STEP)


def test_the_next_token_is_sampled_without_a_wait(cuda: FakeCuda, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reads the tokens and logprobs of all rows at the end."""
    monkeypatch.setattr(cuda, "number", 0.0)  # the difference from the model's own forward pass
    cuda.has_model = False
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(CUDA)
    cuda.has_model = True
    runner = ModelRunner(model, slots=4, context=64)
    prefilled = runner.prefill([[1, 2, 3], [4, 5, 6, 7]], [0, 1], None, [0, 1])
    runner.cache.copy(0, [2], 3)
    runner.cache.swap(0, 1, 3)
    params = SamplingParams(temperature=0.7, top_p=0.9, min_new_tokens=2)
    rows = SamplingRows([(params, 3, frozenset([1]))] * 2, VOCABULARY, CUDA)
    cuda.waits.clear()
    for logits in (prefilled, runner.decode([1, 2], np.array([3, 4]))):
        tokens, logprobs, _ = sample(logits, rows, np.array([3, 4]))
        assert (tokens.shape, tokens.device, logprobs.dtype) == ((2,), CUDA, torch.float32)
    assert cuda.waits == []


def test_a_copy_that_a_graph_would_repeat_is_found(cuda: FakeCuda) -> None:
    def step(inputs_3n: torch.Tensor, length: int) -> torch.Tensor:
        return torch.zeros(inputs_3n.shape[1], 4, device=CUDA) + torch.arange(4.0).to(CUDA, non_blocking=True)

    cuda.waits.clear()
    graphs = DecodeGraphs(step, slots=2, context=16, device=CUDA)
    assert graphs.decode(torch.zeros(3, 2, dtype=torch.int64, device=CUDA), 5).shape == (2, 4)
    assert cuda.waits == ["generation/model_runner.py:DecodeGraphs._capture"]


def waiting(logits: LazyLogits, micro_batch: TensorDict) -> torch.Tensor:
    loss = sft_loss_fn(logits, micro_batch)
    return loss * loss.item()


def with_indices_of_the_cpu(logits: LazyLogits, micro_batch: TensorDict) -> torch.Tensor:
    kept = micro_batch["position_ids"][torch.arange(2)]
    return sft_loss_fn(logits, micro_batch) + kept.sum()


@pytest.mark.parametrize("loss_fn", [waiting, with_indices_of_the_cpu])
def test_a_loss_that_waits_is_found(shared: tuple[FakeCuda, FSDPEngine], loss_fn: Any) -> None:
    found = waits(shared, lambda engine: engine.train_batch(token_batch(LENGTHS), loss_fn, count_loss_tokens))
    assert len(found) == len(OF_A_STEP) + 3


@pytest.mark.parametrize(
    ("made", "refusal"),
    [
        (lambda: torch.zeros(2, 2, device=CUDA) + torch.zeros(2, 2), "cuda:0"),
        (lambda: torch.zeros(2, 2, device=CUDA) @ torch.zeros(2, 2, device=CUDA, dtype=torch.bfloat16), "dtype"),
        (lambda: torch.zeros(2, device=CUDA)[torch.zeros(2, device=CUDA) > 0], "nonzero"),
    ],
)
def test_what_a_gpu_refuses_is_refused(
    shared: tuple[FakeCuda, FSDPEngine], made: Callable[[], torch.Tensor], refusal: str
) -> None:
    with pytest.raises(Exception, match=refusal):
        made()
