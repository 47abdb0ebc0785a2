"""How one episode runs: the contract between the rollout runtime and a user's workflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from arealite.api.engine_api import OutsideRows as OutsideRows
from arealite.api.engine_api import RolloutWorkflow as RolloutWorkflow

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


KEYS_OF_ROWS = ("rewards", "no_eos", "group_index", "sample_index")


def own_metrics(batch: TensorDict) -> dict[str, torch.Tensor]:
    """Return the metrics of the workflow `[B]` by key."""
    return {key: value for key, value in batch.items() if value.dim() == 1 and key not in KEYS_OF_ROWS}


@dataclass(frozen=True)
class Runs:
    """The R runs, each one sample of a group, that B rows belong to."""

    of_rows: torch.Tensor
    """`[B]`, from 0 on, in the order of `first_rows`."""
    first_rows: torch.Tensor
    """`[R]`"""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[R]` sums of `values [B]`."""
        return values.new_zeros(len(self.first_rows)).index_add(0, self.of_rows, values)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[R]` means of `values [B]` in float64."""
        return self.sum(values.double()) / self.of_rows.bincount(minlength=len(self.first_rows))

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[R]` maxima of `values [B]`."""
        return values[self.first_rows].scatter_reduce(0, self.of_rows, values, "amax")


def runs_of(batch: TensorDict, groups: torch.Tensor | None = None) -> Runs:
    """Return the runs of a batch by `sample_index`, without which each row is one, within `groups [B]` (None: one)."""
    if "sample_index" not in set(batch.keys()):
        each = batch["rewards"].long().new_tensor(range(len(batch["rewards"])))
        return Runs(each, each)
    like, samples = batch["sample_index"], batch["sample_index"].tolist()
    names = list(zip([0] * len(samples) if groups is None else groups.tolist(), samples, strict=True))
    first_rows = {name: row for row, name in reversed(list(enumerate(names)))}
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return Runs(
        like.new_tensor([numbers[name] for name in names]),
        like.new_tensor([first_rows[name] for name in numbers]),
    )
