"""Steps of fixed shapes, without the graphs that need a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import build, config

from arealite.generation.model_runner import FixedShapes, ModelRunner, rounded

CONTEXT = 300
PROMPTS = [[5, 9, 7, 3, 11], [8], list(range(2, 40)) * 7, [5, 9, 7, 3, 12]]


@given(st.integers(1, 5000), st.integers(1, 9), st.integers(1, 5000))
def test_counts_are_rounded_up_to_few_values(count: int, log_step: int, limit: int) -> None:
    step, count = 2**log_step, min(count, limit)
    up = rounded(count, step=step, limit=limit)
    assert count <= up <= limit
    assert up == limit or (up % step == 0 if up > step else up & (up - 1) == 0)
    assert up < 2 * count and up < count + max(step, count / 8)


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 4])
def test_added_rows_change_no_logits_and_no_cache_that_is_read(num_sequences: int) -> None:
    runner = ModelRunner(build(config(), seed=1), slots=8, context=CONTEXT)
    fixed = FixedShapes(runner.decode_step, slots=8, context=CONTEXT, device=torch.device("cpu"))
    positions = np.array([len(prompt) for prompt in PROMPTS[:num_sequences]])
    with torch.inference_mode():
        runner.prefill([*PROMPTS, *PROMPTS], range(8))  # the last ones are what ended sequences left
        before = runner.cache.kv.clone()
        expected = runner.decode([13] * num_sequences, positions)
        after = runner.cache.kv.clone()
        runner.cache.kv.copy_(before)
        inputs_3n = torch.from_numpy(np.stack([np.full(num_sequences, 13), positions, positions]))
        found = fixed.decode(inputs_3n, int(positions.max()) + 1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(runner.cache.kv[..., :-1, :], after[..., :-1, :], atol=1e-5, rtol=0)
    assert not after[..., -1, :].any(), "the last position is nobody's"


def test_few_shapes_serve_all_steps() -> None:
    shapes = set()

    def forward(inputs_3n: torch.Tensor, length: int) -> torch.Tensor:
        shapes.add((inputs_3n.shape[1], length))
        return torch.zeros(inputs_3n.shape[1], 4)

    fixed = FixedShapes(forward, slots=64, context=2048, device=torch.device("cpu"))
    for n in range(1, 65):
        for length in range(1, 2049, 31):
            assert len(fixed.decode(torch.zeros(3, n, dtype=torch.int64), length)) == n
    assert len(shapes) <= 8 * 16
    assert (64, 2048) in shapes and (1, 1) in shapes
