"""Metrics of an update: means and extremes of values under masks over micro-batches and ranks, and its costs.

The layers of all ranks run in step, because each layer gathers its weights from all ranks: in every micro-batch a rank
waits for the rank with the most FLOPs. To time that wait apart from the transfer would take a sync of the device.
"""

# B rows, R runs of a workflow, N packed tokens

import math
import re
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from arealite.algorithms.logprobs import trained_tokens
from arealite.algorithms.ratios import k3, masked_log_ratio
from arealite.api.workflow_api import Runs, own_metrics, runs_of
from arealite.utils.distributed import all_reduce_numbers, of_all_ranks
from arealite.utils.images import sees_images
from arealite.utils.stats import Reduction, reduction_of

OF_TOKENS = ("log_ratio", "logprob_gap")
_Reduce = Callable[..., torch.Tensor]
# The reduction of values, its neutral element, and the reduction of two results.
_REDUCTIONS: dict[Reduction, tuple[_Reduce, float, _Reduce]] = {
    "mean": (torch.sum, 0.0, torch.add),
    "max": (torch.max, -math.inf, torch.maximum),
    "min": (torch.min, math.inf, torch.minimum),
}


class MaskedMetrics:
    """Means of values under masks over all additions and ranks; maxima and minima for names with such an ending."""

    def __init__(self) -> None:
        self._totals: dict[str, torch.Tensor] = {}

    def add(self, mask: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Add values under a mask of the same shape."""
        for name, value in values.items() if mask.numel() else ():
            total, of_none, _ = _REDUCTIONS[reduction_of(name)]
            count = mask.double().sum() if total is torch.sum else torch.ones((), device=mask.device)
            kept = torch.where(mask.bool(), value.double(), of_none)
            _merge(self._totals, {name: torch.stack([total(kept), count])})

    def reduce(self) -> dict[str, float]:
        """Return the results over all ranks, which may have added different names (collective).

        Ranks of a block have added the same values, or only those with the last stage have: means stay.
        """
        totals: dict[str, torch.Tensor] = {}
        for of_rank in of_all_ranks({name: entry.cpu() for name, entry in self._totals.items()}):
            _merge(totals, of_rank)
        return {name: total.item() / max(count.item(), 1.0) for name, (total, count) in totals.items()}


def of_runs(batch: TensorDict, runs: Runs, staleness: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the metrics `[R]` of the runs of a batch with `staleness [B]`, including the workflow's own."""
    metrics = {"reward/mean": batch["rewards"][runs.first_rows]}
    metrics |= dict.fromkeys(("staleness/mean", "staleness/max"), runs.max(staleness))
    sampled_R = runs.sum(batch["loss_mask"].sum(dim=1))
    metrics |= {f"rollout/completion_tokens{suffix}": sampled_R for suffix in ("", "_min", "_max")}
    if "no_eos" in batch:
        metrics["rollout/truncated_ratio"] = runs.max(batch["no_eos"].byte())
    return of_workflow(batch, runs) | metrics


def add_batch(
    metrics: MaskedMetrics, batch: TensorDict, trained: torch.Tensor, groups: torch.Tensor, version: int
) -> None:
    """Add the metrics of a batch with the mask `trained [B, T]` at the trainer's `version`."""
    runs, lengths_B = runs_of(batch, groups), batch["attention_mask"].sum(dim=1)
    staleness_B = version - batch["versions"].masked_fill(~trained, version).amin(dim=1)
    metrics.add(torch.ones_like(runs.first_rows), of_runs(batch, runs, staleness_B))
    metrics.add(torch.ones_like(lengths_B), {"rollout/prompt_tokens": lengths_B - batch["loss_mask"].sum(dim=1)})
    if "proximal_logprobs" in batch:
        log_ratio_BT = batch["logprobs"].double() - batch["proximal_logprobs"].double()
        metrics.add(trained, {"policy/mismatch_kl": k3(log_ratio_BT)})


def count_tokens(batch: TensorDict, trained: torch.Tensor, group: dist.ProcessGroup) -> dict[str, float]:
    """Count tokens of the global batch: processed, trained on, without a known logprob (collective)."""
    unknown_BT = trained_tokens(batch["attention_mask"], batch["loss_mask"]) & ~trained
    counts = [mask_BT.sum().item() for mask_BT in (unknown_BT, batch["attention_mask"], trained)]
    names = ("rollout/unknown_logprobs", "perf/processed_tokens", "perf/trained_tokens")
    return dict(zip(names, all_reduce_numbers(counts, group=group), strict=True))


def of_steps(steps: Sequence[Mapping[str, float]], name: str) -> dict[str, float]:
    """Return the metrics `name/...` of the optimizer steps of an update, from the results of `train_batch`."""
    balance = [step["router_aux_loss"] for step in steps if "router_aux_loss" in step]
    return {
        **({f"{name}/router_aux_loss": sum(balance) / len(balance)} if balance else {}),
        f"{name}/grad_norm": sum(step["grad_norm"] for step in steps) / len(steps),
        f"{name}/lr": steps[0]["lr"],
        f"{name}/skipped_steps": sum(1.0 - step["update_successful"] for step in steps),
    }


def of_workflow(batch: TensorDict, runs: Runs) -> dict[str, torch.Tensor]:
    """Return the workflow's own metrics `[R]` of the runs of a batch."""
    own = {name: runs.mean(values) for name, values in own_metrics(batch).items()}
    return {name if "/" in name else f"workflow/{name}": values for name, values in own.items()}


def note_losses(metrics: MaskedMetrics, micro_batch: TensorDict, statistics: dict[str, torch.Tensor]) -> None:
    """Add the `statistics [N]` of a loss; importance weights cover the tokens that no correction dropped."""
    mask_N = micro_batch["loss_mask"]
    kept_N = mask_N & (micro_batch["corrections"] > 0)
    log_weight_N = masked_log_ratio(micro_batch["proximal_logprobs"], micro_batch["rollout_logprobs"], kept_N)
    weight_N = torch.where(kept_N, log_weight_N.exp(), 0.0)
    metrics.add(kept_N, {"policy/rollout_importance_weight": weight_N})
    statistics["rollout_importance_weight_max"] = weight_N
    statistics["rollout_importance_dropped_ratio"] = mask_N & ~kept_N
    if "ratio" in statistics:
        statistics["ratio_max"] = statistics["ratio"]
    metrics.add(mask_N, {f"policy/{name}": value for name, value in statistics.items()})


def note_tokens(per_token: dict[str, torch.Tensor], micro_batch: TensorDict, logprobs: torch.Tensor) -> None:
    """Set `OF_TOKENS` of the trained tokens of a micro-batch at their `token_place`, without a device sync.

    `log_ratio` is log(pi / pi_prox) with the update's `logprobs [N]`, `logprob_gap` is log(pi_prox / pi_rollout).
    """
    mask_N, proximal_N = micro_batch["loss_mask"], micro_batch["proximal_logprobs"]
    pairs = (logprobs, proximal_N), (proximal_N, micro_batch["rollout_logprobs"])
    for key, (numerator, denominator) in zip(OF_TOKENS, pairs, strict=True):
        values_N = torch.where(mask_N, masked_log_ratio(numerator, denominator, mask_N), torch.nan)
        per_token[key][micro_batch["token_place"]] = values_N.to(per_token[key])


def _merge(totals: dict[str, torch.Tensor], added: Mapping[str, torch.Tensor]) -> None:
    for name, entry in added.items():
        merged = _REDUCTIONS[reduction_of(name)][2]
        totals[name] = merged(totals[name], entry) if name in totals else entry


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

    def __init__(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype, block_size: int = 1) -> None:
        """`block_size` ranks share the work on a row; each counts the whole."""
        self._device, config, self._block_size = device, model.config.get_text_config(), block_size
        self._model = model
        self.optimizer: torch.optim.Optimizer | None = None  # the engine's
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
        Recomputation counts once, the output layer and causal attention count as if nothing were masked, and images
        count as their tokens.
        """
        pairs = sum(length * min(length, window) for length in lengths for window in self._windows)
        return self.flops_per_token * sum(lengths) + 12 * self._width * pairs

    def add(self, lengths: Sequence[int], num_positions: int) -> None:
        """Count a micro-batch: the lengths of its sequences, and its positions including padding."""
        self._began_s = self._began_s or time.monotonic()
        self._flops.append(self.flops(lengths))
        self._num_tokens += sum(lengths)
        self._num_positions += num_positions

    def take(self) -> dict[str, float]:
        """Return the metrics of the micro-batches since the last call, equal on all ranks (collective).

        The memory is the peak since the last call on a GPU, and since the start of the process on a CPU.
        """
        seconds = time.monotonic() - (self._began_s or time.monotonic())
        own, counts = sum(self._flops), [self._num_positions, self._num_positions - self._num_tokens]
        numbers = [seconds, self._peak_gib(), *self._held_gib(), -own, *self._flops]
        seconds, peak_gib, weights_gib, moments_gib, least, *largest = all_reduce_numbers(numbers, dist.ReduceOp.MAX)
        of_ranks, num_positions, num_padding = all_reduce_numbers([own, *counts])
        num_ranks, busiest, whole = dist.get_world_size(), sum(largest), of_ranks / self._block_size
        self._reset()
        metrics = {
            "perf/model_tflops": whole / 1e12,
            "perf/idle_share": 1.0 - of_ranks / (num_ranks * busiest) if busiest else 0.0,
            "perf/idle_share_max": 1.0 + least / busiest if busiest else 0.0,
            "perf/padding_share": num_padding / num_positions if num_positions else 0.0,
            "perf/memory_gib_max": peak_gib,
            "perf/memory_gib_weights": weights_gib,
            "perf/memory_gib_moments": moments_gib,
        }
        return metrics | ({"perf/mfu": whole / (num_ranks * seconds * self.peak)} if self.peak and seconds else {})

    def _held_gib(self) -> tuple[float, float]:
        """Return the memory of this rank's parameters and moments."""
        states = [] if self.optimizer is None else self.optimizer.state.values()
        moments = (value for state in states for value in state.values() if torch.is_tensor(value))
        return _gib(self._model.parameters()), _gib(moments)

    def _peak_gib(self) -> float:
        if self._device.type != "cuda":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB
        peak_gib = torch.cuda.max_memory_allocated(self._device) / _GIB
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak_gib


def _gib(tensors: Iterable[torch.Tensor]) -> float:
    own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.nbytes for tensor in own) / _GIB


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
