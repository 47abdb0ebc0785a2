"""Contracts of the engine that trains, the engine that samples, and the workflow whose episodes the latter runs."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from arealite.api.io_struct import (
    FinetuneSpec,
    ModelRequest,
    ModelResponse,
    ParamSpec,
    PromptId,
    SaveLoadMeta,
    WeightUpdateMeta,
)

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from tensordict import TensorDict

    LossFn = Callable[[Any, TensorDict], torch.Tensor]  # of LazyLogits, which live above contracts
    LossWeightFn = Callable[[TensorDict], float]


class TrainEngine(abc.ABC):
    """Trains one model, SPMD: every rank calls every method. Batches are padded TensorDicts `[B, S]`, which may differ
    in size between ranks and may be empty on some."""

    meeting_point: Callable[[str], tuple[str, int, bool]] | None = None
    """Tells where the sender of a broadcast will listen for a host, and whether it has a GPU, if that is not this
    process."""

    @abc.abstractmethod
    def initialize(self, addr: str | None, ft_spec: FinetuneSpec | None) -> None:
        """Join the process group, load the model, build optimizer and schedule. `addr` is None for SPMD engines."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Free the model and the groups this engine owns."""

    @property
    @abc.abstractmethod
    def parallelism_group(self) -> dist.ProcessGroup:
        """The group of all ranks of this engine, for reducing statistics."""

    @abc.abstractmethod
    def train(self, mode: bool = True) -> None:
        """Switch to training mode."""

    def eval(self) -> None:
        """Switch to evaluation mode."""
        self.train(False)

    @abc.abstractmethod
    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the weights: the sending half of a weight update (collective). A failure raises on every rank."""

    @abc.abstractmethod
    def get_param_specs(self, weight_chunked_mem_mb: int = 1024, num_senders: int | None = 1) -> list[list[ParamSpec]]:
        """Name, full shape and dtype of every tensor in send order, in buckets of at most that many MiB, and which of
        so many ranks sends it; None is one rank of each node."""

    @abc.abstractmethod
    def set_version(self, version: int) -> None:
        """Set the version of the weights."""

    @abc.abstractmethod
    def get_version(self) -> int:
        """Return the version of the weights."""

    @abc.abstractmethod
    def save(self, meta: SaveLoadMeta) -> None:
        """Write a Hugging Face checkpoint (collective); it is whole when any rank returns."""

    @abc.abstractmethod
    def load(self, meta: SaveLoadMeta) -> None:
        """Read a Hugging Face checkpoint (collective)."""

    @abc.abstractmethod
    def step_lr_scheduler(self) -> None:
        """Advance the learning-rate schedule by one step."""

    @abc.abstractmethod
    def train_batch(
        self, input_: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *, rows_per_unit: int = 1
    ) -> dict[str, float]:
        """Take one optimizer step.

        `loss_fn(logits, micro_batch)` gets `LazyLogits` (for `gather_logprobs`; `logits.dense()` is `[N, V]`) and the
        packed micro-batch (1-D tensors of N tokens, `cu_seqlens`) and returns the mean of the loss over what
        `loss_weight_fn(micro_batch)` counts. The gradient is that of `sum(mean * weight) / sum(weight)` over all
        micro-batches and ranks, however the batch was split. Every `rows_per_unit` rows, such as pairs, stay together.
        """

    @abc.abstractmethod
    def eval_batch(
        self, input_: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *, rows_per_unit: int = 1
    ) -> float:
        """Return the loss of `train_batch` without a gradient, equal on all ranks."""

    @abc.abstractmethod
    def forward(self, input_: TensorDict, post_hook: Callable[[Any, TensorDict], torch.Tensor]) -> torch.Tensor:
        """Apply `post_hook(logits, micro_batch) -> [N]` without gradient and return it padded as `[B, S]`."""


class InferenceEngine(abc.ABC):
    """Samples from the policy. On ranks other than 0 it is a receiver of what rank 0 collects."""

    @abc.abstractmethod
    def initialize(self, addr: str | None, ft_spec: FinetuneSpec | None) -> None:
        """Wait until the servers are ready and start the rollout runtime."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Stop the rollout runtime. Servers are left running."""

    @abc.abstractmethod
    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one completion, continuing token-exactly when a server interrupts it."""

    @abc.abstractmethod
    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        """Start the receiving half of a weight update (rank 0 only); `meta` is then complete for the sender."""

    @abc.abstractmethod
    def set_version(self, version: int) -> None:
        """Set the version that capacity and staleness are computed from."""

    @abc.abstractmethod
    def get_version(self) -> int:
        """Return the version."""

    @abc.abstractmethod
    def submit(self, data: dict[str, Any], workflow: RolloutWorkflow) -> None:
        """Queue one episode and return at once (rank 0)."""

    @abc.abstractmethod
    def wait(
        self, count: int, timeout: float | None = None, should_accept: Callable[[TensorDict], bool] | None = None
    ) -> TensorDict:
        """Return `count` accepted trajectories, oldest first (rank 0). Raises TimeoutError, and then loses nothing."""

    @abc.abstractmethod
    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> TensorDict:
        """Run one episode per item now, unthrottled by staleness, and return this rank's share (collective)."""

    @abc.abstractmethod
    def prepare_batch(
        self,
        dataloader: Iterable[list[dict[str, Any]]] | OutsideRows,
        workflow: RolloutWorkflow,
        should_accept: Callable[[TensorDict], bool] | None = None,
    ) -> TensorDict:
        """Keep episodes in flight; return this rank's share of the next batch of bounded staleness (collective)."""

    @abc.abstractmethod
    def evaluate_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> dict[str, float]:
        """Run one episode per item now and return metrics, equal on all ranks (collective).

        `reward`, and `accuracy` if every reward is 0 or 1, both with `_low` and `_high`; `num_failed` have no result.
        """

    @abc.abstractmethod
    def pause(self) -> None:
        """Start no new episodes."""

    @abc.abstractmethod
    def resume(self) -> None:
        """Start episodes again."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Make what became of all prompts durable and return it as plain data; empty on ranks other than 0."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint, before the first episode."""

    @abc.abstractmethod
    def note_checkpoint(self, step: int, position: int) -> None:
        """Note that a checkpoint was published whose `state_dict` had this `ledger_position`."""


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
