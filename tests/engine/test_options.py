"""Options of memory and speed change neither what is learned nor what a checkpoint restores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch._dynamo.utils import counters
from training_cases import OPTIMIZER, token_batch, train_config
from transformers import Qwen3Config, Qwen3ForCausalLM

from arealite.algorithms.logprobs import LazyLogits, count_loss_tokens
from arealite.api.cli_args import OptimizerConfig
from arealite.api.io_struct import SaveLoadMeta
from arealite.engine import optimizer
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.sft.lm_engine import sft_loss_fn

Make = Callable[..., FSDPEngine]
BATCHES = [token_batch([9, 4, 12, 3, 7], seed) for seed in range(3)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "tie_word_embeddings": False}
    config = Qwen3Config(vocab_size=64, initializer_range=0.3, **heads, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def make(start: Callable[..., Any], path: str) -> Make:
    return lambda **changes: start(FSDPEngine(train_config(path, **{"max_tokens": 16} | changes)))


def train(engine: FSDPEngine, batches: list[TensorDict] = BATCHES) -> list[float]:
    """Take a step per batch and return the losses and gradient norms."""
    engine.train()
    metrics = [engine.train_batch(batch, sft_loss_fn, count_loss_tokens) for batch in batches]
    return [one[name] for one in metrics for name in ("loss", "grad_norm")]


def of_type(name: str, **changes: Any) -> OptimizerConfig:
    return OptimizerConfig(**OPTIMIZER | {"type": name} | changes)


# Activations


def test_inputs_of_layers_are_offloaded_and_change_no_bit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the tensor itself is what is on the host, so its moves are counted."""
    moved: list[int] = []
    cpu = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.numel())
        return cpu(tensor)

    plain, engine = (
        make(gradient_checkpointing=True, activation_offloading=offloads, max_tokens=None) for offloads in (False, True)
    )
    expected = train(plain, BATCHES[:1]), plain.fingerprint()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", counted)
        losses = train(engine, BATCHES[:1])
    assert (losses, engine.fingerprint()) == expected
    assert moved.count(35 * 64) == 2, "the input [35, 64] of each of two layers, and nothing else of a layer"
    assert max(moved) == 35 * 64


# Moments


def assert_restored(make: Make, folder: Path, **changes: Any) -> FSDPEngine:
    """A run that stops after one of three steps continues bit for bit: from a checkpoint, a snapshot, a saved model."""
    engine = make(**changes)
    train(engine, BATCHES[:1])
    engine.step_lr_scheduler()
    engine.keep_rng()
    engine.keep_state()
    snapshot = engine.snapshot()
    engine.save(SaveLoadMeta(str(folder / "model"), with_optim=True))
    expected = train(engine, BATCHES[1:]), engine.fingerprint()
    engine.write_state(str(folder / "state"))
    for restore in (
        lambda one: one.read_state(str(folder / "state")),
        lambda one: one.restore(snapshot),
        lambda one: one.load(SaveLoadMeta(str(folder / "model"), with_optim=True)),
    ):
        other = make(**changes)
        restore(other)
        assert (train(other, BATCHES[1:]), other.fingerprint()) == expected
    return engine


def test_bfloat16_moments_are_restored_bit_for_bit(make: Make, tmp_path: Path) -> None:
    engine = assert_restored(make, tmp_path, optimizer=of_type("adam_bf16"))
    moments = [state[name] for state in engine.optimizer.state.values() for name in optimizer.MOMENTS]
    assert {one.dtype for one in moments} == {torch.bfloat16}
    exact = make(optimizer=of_type("adam"))
    losses, expected = train(make(optimizer=of_type("adam_bf16"))), train(exact)
    assert losses != expected and losses == pytest.approx(expected, rel=0.05)


# Output layer


def logprob_error(engine: FSDPEngine) -> float:
    """Return the mean distance of logprobs from float64 ones of the same hidden states and the float32 weights."""
    weight = engine.model.lm_head.weight.full_tensor().detach().double()
    errors = []

    def compare(logits: LazyLogits, packed: TensorDict) -> torch.Tensor:
        found = logits.dense().log_softmax(-1).double()
        errors.append((found - (logits.hidden_NH.double() @ weight.T).log_softmax(-1)).abs().mean())
        return found[:, 0]

    engine.forward(BATCHES[0], compare)
    return float(torch.stack(errors).mean())


def test_a_float32_output_layer_makes_bfloat16_logprobs_exact(make: Make) -> None:
    rounded, exact = (make(dtype="bfloat16", cast_lm_head_to_fp32=is_exact) for is_exact in (False, True))
    assert logprob_error(rounded) > 1e-3 and logprob_error(exact) < 1e-6
    assert train(exact) == pytest.approx(train(rounded), rel=0.03), "all else is as it was"
    assert {one.dtype for one in exact.model.parameters()} == {torch.float32}


# Compiled layers


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.slow
def test_compiled_layers_learn_the_same_and_are_not_compiled_for_every_batch(make: Make) -> None:
    expected = train(make())
    counters.clear()
    engine = make(torch_compile=True, gradient_checkpointing=True)
    assert train(engine) == pytest.approx(expected, rel=1e-4)
    logprob_error(engine)  # a pass without gradients
    compiled = num_graphs()
    for lengths in ([5, 3], [11, 2, 2, 6], [8], [4, 4, 4], [13, 12, 9]):  # other tokens and numbers of sequences
        batch = token_batch(lengths)
        train(engine, [batch])
        engine.forward(batch, lambda logits, packed: logits.dense()[:, 0])
    assert 0 < num_graphs() == compiled


def test_the_log_says_which_attention_and_why(make: Make, path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="arealite.engine"):
        make()
    lines = [(one.levelname, one.getMessage()) for one in caplog.records if "attention" in one.getMessage()]
    assert lines == [("DEBUG", f"attention of {path}: packed_sdpa, always on a cpu")], "only a GPU has a choice"
