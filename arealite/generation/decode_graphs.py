"""Decoding of the first n slots in fixed shapes, which a GPU replays as CUDA graphs: Python launches the kernels of a
small model more slowly than they run.

A graph has one shape, so numbers of sequences and lengths are rounded up. Added rows write to the last position
of their slots, which no sequence uses: the last token of the longest sequence has no successor."""

# n sequences, L cached tokens, V vocabulary

import functools
from collections.abc import Callable
from typing import Any

import torch

ROW_STEP, LENGTH_STEP = 16, 256
"""What numbers of sequences and lengths are rounded to, see `rounded`."""
MAX_SHAPES = 128
"""Shapes that are prepared at a time: graphs cost memory, and 64 sequences of 32k tokens have 384 shapes."""

Forward = Callable[[torch.Tensor, int], torch.Tensor]
"""Decodes tokens, positions and rotary positions `[3, n]` over a cache of L tokens; returns logits `[n, V]`."""


def rounded(count: int, *, step: int, limit: int) -> int:
    """Round up to a power of two, above `step` to a multiple of it and of a sixteenth of that power, but not beyond
    `limit`."""
    power = 1 << (count - 1).bit_length()
    step = max(step, power // 16)
    return min(power if count <= step else -(-count // step) * step, limit)


class FixedShapes:
    """Runs a forward pass in few shapes, as CUDA graphs or as it is."""

    def __init__(self, forward: Forward, *, slots: int, context: int, device: torch.device) -> None:
        """`forward` must take any number of sequences up to `slots`, and lengths up to `context`."""
        self._forward = forward
        self._slots, self._context = slots, context
        self._inputs_3n = torch.zeros(3, slots, dtype=torch.int64, device=device)
        self._replay_of = functools.lru_cache(maxsize=MAX_SHAPES)(self._prepared)
        self._pool: Any = None  # memory that all graphs share
        self._logits_nV: torch.Tensor | None = None  # so that none keeps its own

    def decode(self, inputs_3n: torch.Tensor, length: int) -> torch.Tensor:
        """Decode one token each of slots 0..n-1, which hold at most `length` tokens with it; return `[n, V]`, which the
        next call overwrites."""
        n = inputs_3n.shape[1]
        num_rows = rounded(n, step=ROW_STEP, limit=self._slots)
        shape = num_rows, rounded(length, step=LENGTH_STEP, limit=self._context)
        self._inputs_3n[:, :n].copy_(inputs_3n)
        self._inputs_3n[:, n:num_rows] = 0
        self._inputs_3n[1, n:num_rows] = self._context - 1
        return self._replay_of(*shape)()[:n]

    def forget(self) -> None:
        """Prepare every shape anew, as the weights have moved."""
        self._replay_of.cache_clear()

    def _prepared(self, num_rows: int, length: int) -> Callable[[], torch.Tensor]:
        """Return what runs a step of one shape on the inputs."""
        inputs_3n = self._inputs_3n[:, :num_rows]
        if inputs_3n.device.type != "cuda":
            return lambda: self._forward(inputs_3n, length)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up in a first pass, which no graph may hold
            logits = self._forward(inputs_3n, length)
        torch.cuda.current_stream().wait_stream(stream)
        if self._logits_nV is None:
            self._logits_nV = logits.new_empty(self._slots, logits.shape[1])
        logits_nV = self._logits_nV
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # Another thread, a trainer's, may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits_nV[:num_rows] = self._forward(inputs_3n, length)

        def replay() -> torch.Tensor:
            graph.replay()
            return logits_nV

        return replay
