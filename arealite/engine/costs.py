"""What an update costs: FLOPs of the model, padding, waiting and memory, from numbers that the host knows anyway.

The layers of all ranks run in step, as each gathers its weights from all of them, so a rank waits in every micro-batch
until the rank with the most FLOPs is done. No clock tells that wait from the transfer without stopping the device.
"""

import re
import resource
import time
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from arealite.utils.distributed import all_reduce_numbers
from arealite.utils.images import sees_images

_PEAKS = {
    r"H[12]00 NVL": 835e12,
    r"H100 PCIe": 756e12,
    r"(H[128]00|GH200)\b": 989e12,
    r"\bB200\b": 2250e12,
    r"\bA[18]00\b": 312e12,
    r"\bL40S\b": 362e12,
    r"\bL4\b": 121e12,
}
"""Dense FLOP/s in 16 bits of the data sheets, by the name of the device; the first that matches counts."""
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as configs of models call it
_MOST = 4096  # micro-batches that are remembered, if nobody asks for them
_GIB = 2**30


class UpdateCosts:
    """The costs of one update after another of a rank."""

    def __init__(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
        self._device, config = device, model.config.get_text_config()
        self.flops_per_token = flops_per_token(model)
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        self._width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
        self._windows = [_window(kind, config) for kind in kinds]
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = None if sees_images(model.config) else peak_flops(name, dtype)
        self._reset()

    def _reset(self) -> None:
        self._began_s: float | None = None
        self._flops: deque[float] = deque(maxlen=_MOST)  # of each micro-batch
        self._num_tokens = self._num_positions = 0

    def flops(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of forward and backward pass over sequences: 6 per parameter and token (4 if it is frozen),
        and 12 per token, attended position and entry of all heads, as PaLM counts (arXiv:2204.02311, appendix B).

        What is recomputed counts once, and causal attention as if nothing were masked. Images count as their tokens.
        """
        pairs = sum(length * min(length, window) for length in lengths for window in self._windows)
        return self.flops_per_token * sum(lengths) + 12 * self._width * pairs

    def add(self, lengths: Sequence[int], num_positions: int) -> None:
        """Note a micro-batch with sequences of these lengths that is computed in so many positions."""
        self._began_s = self._began_s or time.monotonic()
        self._flops.append(self.flops(lengths))
        self._num_tokens += sum(lengths)
        self._num_positions += num_positions

    def take(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Return the metrics of the micro-batches since the last time, equal on all ranks (collective).

        Memory is that since the last time on a GPU, and since the process began on a CPU.
        """
        seconds = time.monotonic() - (self._began_s or time.monotonic())
        own, counts = sum(self._flops), [self._num_positions, self._num_positions - self._num_tokens]
        numbers = [seconds, self._peak_gib(), -own, *self._flops]
        seconds, peak_gib, least, *largest = all_reduce_numbers(numbers, dist.ReduceOp.MAX, group)
        whole, num_positions, num_padding = all_reduce_numbers([own, *counts], group=group)
        num_ranks, busiest = dist.get_world_size(group), sum(largest)
        self._reset()
        metrics = {
            "perf/model_tflops": whole / 1e12,
            "perf/idle_share": 1.0 - whole / (num_ranks * busiest) if busiest else 0.0,
            "perf/idle_share_max": 1.0 + least / busiest if busiest else 0.0,
            "perf/padding_share": num_padding / num_positions if num_positions else 0.0,
            "perf/memory_gib_max": peak_gib,
        }
        return metrics | ({"perf/mfu": whole / (num_ranks * seconds * self.peak)} if self.peak and seconds else {})

    def _peak_gib(self) -> float:
        if self._device.type != "cuda":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB
        peak_gib = torch.cuda.max_memory_allocated(self._device) / _GIB
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak_gib


def peak_flops(name: str, dtype: torch.dtype) -> float | None:
    """Return what a device of this name can do per second at most; None if that is not known."""
    if dtype not in (torch.bfloat16, torch.float16) or "MIG" in name:  # a part of a device
        return None
    return next((peak for pattern, peak in _PEAKS.items() if re.search(pattern, name)), None)


def flops_per_token(model: PreTrainedModel) -> float:
    """Return the FLOPs of the matrix products of a token with the parameters, forward and backward."""
    config, output = model.config.get_text_config(), model.get_output_embeddings()
    decoder = model.base_model if output is None else model.get_decoder()
    num_experts = next(filter(None, (getattr(config, name, None) for name in _NUM_EXPERTS)), 1)
    active = (getattr(config, "num_experts_per_tok", None) or num_experts) / num_experts
    embeddings = {one.weight for one in decoder.modules() if isinstance(one, torch.nn.Embedding)}  # looked up
    products = [
        (active if ".experts." in name else 1.0, parameter)
        for name, parameter in decoder.named_parameters()
        if parameter.dim() > 1 and parameter not in embeddings
    ]
    products += [] if output is None else [(1.0, output.weight)]
    return sum(share * one.numel() * (6 if one.requires_grad else 4) for share, one in products)


def _window(kind: str, config: object) -> float:
    """Return how many positions a layer of this kind attends to at most."""
    if "sliding" in kind:
        return getattr(config, "sliding_window", None) or float("inf")
    return float("inf") if kind == "full_attention" else 0
