"""How one episode runs: the contract between the rollout runtime and a user's workflow."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensordict import TensorDict

    from arealite.api.engine_api import InferenceEngine


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
        """
