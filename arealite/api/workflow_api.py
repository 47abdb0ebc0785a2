"""How one episode runs: the contract between the rollout runtime and a user's workflow."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

    from arealite.api.engine_api import InferenceEngine


_KEYS_OF_ROWS = ("rewards", "no_eos", "group_index")


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

        Any other key `[B]` is a metric of the workflow: its mean is logged as `workflow/<key>` (as `<key>` if that has
        a `/`) and in evaluations as `eval/<key>`.
        """


def own_metrics(batch: TensorDict) -> dict[str, torch.Tensor]:
    """Return the metrics of the workflow `[B]` by key."""
    return {key: value for key, value in batch.items() if value.dim() == 1 and key not in _KEYS_OF_ROWS}
