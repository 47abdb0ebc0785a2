from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict
from training_cases import train_config

from arealite.api.cli_args import OptimizerConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.sft.lm_engine import FSDPLMEngine


@pytest.fixture
def engine(lm_path: str) -> Iterator[FSDPLMEngine]:
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.0, lr_scheduler_type="linear", warmup_steps_proportion=0.0)
    engine = FSDPLMEngine(train_config(lm_path, max_tokens=40, optimizer=optimizer))
    engine.initialize(None, FinetuneSpec(1, 40, 1))
    yield engine
    engine.destroy()


def counting_batch() -> TensorDict:
    """Sequences that count up from a start; the start is the prompt."""
    input_ids = torch.arange(1, 9)[:, None] + torch.arange(6)
    everywhere = torch.ones_like(input_ids)
    return TensorDict(
        {"input_ids": input_ids, "attention_mask": everywhere, "loss_mask": (torch.arange(6) > 0) * everywhere},
        batch_size=[8],
    )


def test_the_loss_falls_on_a_tiny_corpus(engine: FSDPLMEngine) -> None:
    batch = counting_batch()
    before = engine.evaluate_lm(batch)
    metrics = [engine.train_lm(batch) for _ in range(40)]
    assert metrics[0]["sft/loss"] == pytest.approx(before, abs=1e-5)
    assert before > 3.0 and engine.evaluate_lm(batch) < 0.05
    assert [m["optim/lr"] for m in metrics[:3]] == pytest.approx([1e-2, 0.975e-2, 0.95e-2])
    assert metrics[0]["perf/processed_tokens"] == 48.0 and metrics[0]["perf/trained_tokens"] == 40.0
    assert metrics[0]["optim/skipped_steps"] == 0.0
    assert metrics[0]["sft/ppl"] == pytest.approx(torch.tensor(before).exp().item(), rel=1e-4)
