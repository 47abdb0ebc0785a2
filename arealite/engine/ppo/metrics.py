"""Metrics of an update: means and extremes of values under masks, over micro-batches and ranks."""

# B rows, R runs of a workflow, N packed tokens

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from tensordict import TensorDict

from arealite.algorithms.logprobs import trained_tokens
from arealite.algorithms.ratios import k3, masked_log_ratio
from arealite.api.workflow_api import Runs, own_metrics, runs_of
from arealite.utils.distributed import all_reduce_numbers, of_all_ranks
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

    def reduce(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Return the results over all ranks, which may have added different names (collective)."""
        totals: dict[str, torch.Tensor] = {}
        for of_rank in of_all_ranks({name: entry.cpu() for name, entry in self._totals.items()}, group):
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
    return {
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
