"""Decoding in rounded shapes; the steps run as they are where CUDA graphs would replay them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny_models import build, config

from arealite.generation.model_runner import MAX_GRAPHS, DecodeGraphs, ModelRunner

CONTEXT = 300
PROMPTS = [[5, 9, 7, 3, 11], [8], list(range(2, 40)) * 7, [5, 9, 7, 3, 12]]
Step = Callable[[torch.Tensor, int], torch.Tensor]


class Replay:
    """A graph that calculates again."""

    def __init__(self, graphs: DecodeGraphs, num_rows: int, length: int) -> None:
        self._graphs, self._shape = graphs, (num_rows, length)

    def replay(self) -> None:
        num_rows, length = self._shape
        self._graphs._logits_nV = self._graphs._step(self._graphs._inputs_3n[:, :num_rows], length)


def graphs(monkeypatch: pytest.MonkeyPatch, step: Step, slots: int, context: int) -> DecodeGraphs:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda *arguments: Replay(*arguments))
    return DecodeGraphs(step, slots=slots, context=context, device=torch.device("cpu"))


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 4])
def test_added_rows_change_no_logits_and_no_cache_that_is_read(
    monkeypatch: pytest.MonkeyPatch, num_sequences: int
) -> None:
    runner = ModelRunner(build(config(), seed=1), slots=8, context=CONTEXT)
    positions = np.array([len(prompt) for prompt in PROMPTS[:num_sequences]])
    with torch.inference_mode():
        runner.prefill([*PROMPTS, *PROMPTS], range(8))  # the last ones are what ended sequences left
        before = runner.cache.kv.clone()
        expected = runner.decode([13] * num_sequences, positions)
        after = runner.cache.kv.clone()
        runner.cache.kv.copy_(before)
        runner._graphs = graphs(monkeypatch, runner.decode_step, 8, CONTEXT)
        found = runner.decode([13] * num_sequences, positions)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(runner.cache.kv[..., :-1, :], after[..., :-1, :], atol=1e-5, rtol=0)
    assert not after[..., -1, :].any(), "the last position is nobody's"


def test_few_shapes_serve_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = set()

    def step(inputs_3n: torch.Tensor, length: int) -> torch.Tensor:
        shapes.add((inputs_3n.shape[1], length))
        return torch.zeros(inputs_3n.shape[1], 4)

    fixed = graphs(monkeypatch, step, 64, 4096)
    for n in range(1, 65):
        for length in range(1, 4097, 31):
            assert len(fixed.decode(torch.zeros(3, n, dtype=torch.int64), length)) == n
    assert {rows for rows, _ in shapes} == {8, 16, 32, 64}
    assert all(length % 256 == 0 for _, length in shapes)
    assert len(shapes) == MAX_GRAPHS
