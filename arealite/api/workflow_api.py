"""How one episode runs: the contract between the rollout runtime and a user's workflow."""

from __future__ import annotations

import abc
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from arealite.api.engine_api import InferenceEngine
    from arealite.api.io_struct import PromptId


KEYS_OF_ROWS = ("rewards", "no_eos", "group_index", "sample_index")


class RolloutWorkflow(abc.ABC):
    """Turns one item of the data set into one trajectory.

    A workflow that has an attribute `tokenizer` gets its texts into the stored rollouts.
    """

    @abc.abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict | None:
        """Run one episode; None rejects it.

        Returns a padded TensorDict with one row per sample: `input_ids [B, S]` int64, `attention_mask [B, S]` bool,
        `loss_mask [B, S]` (1 on sampled tokens), `logprobs [B, S]` (the server's; 0 elsewhere), `versions [B, S]`
        (the weights that sampled the token; -1 elsewhere), `rewards [B]`, and optionally `no_eos [B]` bool (the
        answer was cut off at the token limit).

        A run, one sample of the group, has one row unless `sample_index [B]` int64 gives several rows the same number;
        they then share `rewards`, and group statistics and metrics count the run once. `turn_rewards [B, S]` is what
        each turn earned, on its last token: sums from a turn on are its return, and take the place of `rewards` for a
        critic and without a baseline. Baselines of groups compare `rewards` and leave them out.

        For a model that sees images, `pixel_values [B, P, D]` and `image_grid_thw [B, I, 3]` have the patches of each
        row and their grids, padded with 0 (`VisionRLVRWorkflow`).

        Any other key `[B]` is a metric of the workflow: its mean is logged as `workflow/<key>` (as `<key>` if that has
        a `/`) and in evaluations as `eval/<key>`.
        """


class OutsideRows(abc.ABC):
    """Rows that others bring when they like, in place of a dataloader; each starts an episode at once, or none."""

    @abc.abstractmethod
    def open(self, admit: Callable[[dict[str, Any]], Future[bool]], *, episode_timeout: float) -> None:
        """Begin to take rows (rank 0, once); `admit` starts the episode of one, unless none may start now."""

    @abc.abstractmethod
    def fetch(self, prompt_id: PromptId) -> dict[str, Any]:
        """Return what is left of a row after a restart."""


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
