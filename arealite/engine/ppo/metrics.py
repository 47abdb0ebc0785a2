"""Metrics of an update: means and extremes of values under masks, over micro-batches and ranks."""

import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from arealite.utils.stats import Reduction, reduction_of

_Reduce = Callable[..., torch.Tensor]
_REDUCTIONS: dict[Reduction, tuple[_Reduce, float, _Reduce]] = {  # of values, the result of none, of two results
    "mean": (torch.sum, 0.0, torch.add),
    "max": (torch.max, -math.inf, torch.maximum),
    "min": (torch.min, math.inf, torch.minimum),
}


class MaskedMetrics:
    """Means (maxima, minima where a name ends so) of values under masks, over all that was added and all ranks."""

    def __init__(self) -> None:
        self._totals: dict[str, torch.Tensor] = {}

    def add(self, mask: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Add values under a mask of their shape."""
        for name, value in values.items() if mask.numel() else ():
            total, of_none, _ = _REDUCTIONS[reduction_of(name)]
            count = mask.double().sum() if total is torch.sum else torch.ones((), device=mask.device)
            kept = torch.where(mask.bool(), value.double(), of_none)
            _merge(self._totals, {name: torch.stack([total(kept), count])})

    def reduce(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Return the results, also of names that only other ranks added (collective)."""
        of_ranks: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, {name: entry.cpu() for name, entry in self._totals.items()}, group=group)
        totals: dict[str, torch.Tensor] = {}
        for of_rank in of_ranks:
            _merge(totals, of_rank)
        return {name: total.item() / max(count.item(), 1.0) for name, (total, count) in totals.items()}


def _merge(totals: dict[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> None:
    for name, other in others.items():
        merged = _REDUCTIONS[reduction_of(name)][2]
        totals[name] = merged(totals[name], other) if name in totals else other
