"""The costs of an update: FLOPs of the model, padding, waiting and memory, without a sync of the device.

The layers of all ranks run in step, because each layer gathers its weights from all ranks: in every micro-batch a rank
waits for the rank with the most FLOPs. To time that wait apart from the transfer would take a sync of the device.
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
"""Dense 16-bit FLOP/s from the data sheets, by a pattern for the device's name; the first match counts."""
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names in model configs
_NUM_KEPT = 4096  # micro-batches; a critic's costs are never taken
_GIB = 2**30


class UpdateCosts:
    """Counts the costs of each update of a rank."""

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
        self._flops: deque[float] = deque(maxlen=_NUM_KEPT)  # of each micro-batch
        self._num_tokens = self._num_positions = 0

    def flops(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of the forward and backward pass over sequences (PaLM, arXiv:2204.02311, appendix B).

        A token has 6 FLOPs per parameter (4 per frozen parameter), and 12 per attended position and entry of all heads.
        Recomputation counts once, causal attention counts as if nothing were masked, and images count as their tokens.
        """
        pairs = sum(length * min(length, window) for length in lengths for window in self._windows)
        return self.flops_per_token * sum(lengths) + 12 * self._width * pairs

    def add(self, lengths: Sequence[int], num_positions: int) -> None:
        """Count a micro-batch: the lengths of its sequences, and its positions including padding."""
        self._began_s = self._began_s or time.monotonic()
        self._flops.append(self.flops(lengths))
        self._num_tokens += sum(lengths)
        self._num_positions += num_positions

    def take(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Return the metrics of the micro-batches since the last call, equal on all ranks (collective).

        The memory is the peak since the last call on a GPU, and since the start of the process on a CPU.
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
    """Return the peak FLOP/s of a device by its name; None if it is unknown, as for a part of a device (MIG)."""
    if dtype not in (torch.bfloat16, torch.float16) or "MIG" in name:
        return None
    return next((peak for pattern, peak in _PEAKS.items() if re.search(pattern, name)), None)


def flops_per_token(model: PreTrainedModel) -> float:
    """Return the FLOPs per token of the matrix products with parameters, forward and backward."""
    config, output = model.config.get_text_config(), model.get_output_embeddings()
    decoder = model.base_model if output is None else model.get_decoder()
    num_experts = next(filter(None, (getattr(config, name, None) for name in _NUM_EXPERTS)), 1)
    active = (getattr(config, "num_experts_per_tok", None) or num_experts) / num_experts
    modules = decoder.modules()
    looked_up = {module.weight for module in modules if isinstance(module, torch.nn.Embedding)}
    products = [
        (active if ".experts." in name else 1.0, parameter)
        for name, parameter in decoder.named_parameters()
        if parameter.dim() > 1 and parameter not in looked_up
    ]
    products += [] if output is None else [(1.0, output.weight)]
    return sum(share * weight.numel() * (6 if weight.requires_grad else 4) for share, weight in products)


def _window(kind: str, config: object) -> float:
    """Return the largest number of positions to which a layer of this kind attends."""
    if "sliding" in kind:
        return getattr(config, "sliding_window", None) or float("inf")
    return float("inf") if kind == "full_attention" else 0
