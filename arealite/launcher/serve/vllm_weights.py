"""Weights from the trainer into a running vLLM: a weight transfer engine of ours, and what it adds to vLLM's workers.

vLLM's own engines move tensors of a GPU only and wait without a deadline; this one uses the broadcast group of
`utils.weight_transfer`, on gloo or NCCL. vLLM imports this module in each worker because it is named as the worker
extension, and that registers the engine as `arealite`.

Invariant: after a failed bucket the group is closed, which fails the sender at once, and each layer is whole: it has
its new weights or its old ones, so the server lives on and the next update, in a new group, makes it consistent again.
Memory: tensors of a bucket are held until vLLM has loaded the layer they belong to.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from arealite.utils.fingerprint import differing, fingerprints
from arealite.utils.weight_transfer import BroadcastGroup, close_group, join_group, receive_bucket

BACKEND = "arealite"
"""Name of the engine in vLLM's --weight-transfer-config."""


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """The broadcast group to join; worker `i` of this server is rank `rank_offset + i`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: Literal["gloo", "nccl"]
    timeout_s: float
    """Deadline of joining, and of each bucket."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """The tensors of one bucket, in the order in which they arrive."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


@dataclass(frozen=True)
class ArrivingTensor:
    """One tensor of a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class BroadcastWeightEngine(WeightTransferEngine[GroupInfo, BucketInfo]):
    """Receives buckets from rank 0 of a broadcast group into one worker's model."""

    init_info_cls = GroupInfo
    update_info_cls = BucketInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._group: BroadcastGroup | None = None
        self._received: dict[str, str] = {}

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Leave the old group, if any, and join a new one."""
        self.shutdown()
        with self._failing_together():
            parallel = self.parallel_config
            self._group = join_group(
                init_info.master_address,
                init_info.master_port,
                init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank,
                init_info.world_size,
                init_info.group_name,
                backend=init_info.backend,
                timeout_s=init_info.timeout_s,
            )

    def start_weight_update(self) -> None:
        """Let vLLM buffer the tensors of each layer until the layer is complete."""
        self._received = {}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one bucket and load it."""
        with self._failing_together():
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type == "cuda":
                torch.cuda.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Receive the tensors, keep their fingerprints and hand them to the model."""
        if self._group is None:
            raise ConnectionError("a broadcast group must be open: got none. POST /init_weight_transfer_engine first.")
        described = zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True)
        bucket = receive_bucket(
            self._group, [ArrivingTensor(name, dtype, tuple(shape)) for name, dtype, shape in described]
        )
        self._received |= fingerprints(bucket)
        self.model.load_weights(bucket.items())

    def finish_weight_update(self) -> None:
        """Complete the layers that vLLM completes last."""
        finalize_layerwise_reload(self.model, self.model_config)

    def abandon(self) -> None:
        """Give layers that are not complete their old weights back. Idempotent."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)

    def mismatched(self, expected: dict[str, str]) -> list[str]:
        """Name the tensors that the last update did not bring as `expected`, by `utils.fingerprint`."""
        return differing(self._received, expected)

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Let all workers of the server fail if one does, and only the last one raise.

        vLLM stops reading the workers' replies at the first error, and what it left unread it takes for the replies
        to its next call.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        errors: list[Any] = [None] * get_world_group().world_size
        dist.all_gather_object(errors, error and f"{type(error).__name__}: {error}", group=get_world_group().cpu_group)
        if cause := next(filter(None, errors), None):
            self.shutdown()
            self.abandon()
            if self.parallel_config.rank == self.parallel_config.world_size - 1:
                raise RuntimeError(cause) from error

    def shutdown(self) -> None:
        """Leave the group. Idempotent."""
        if self._group is not None:
            close_group(self._group)
            self._group = None


class WorkerExtension:
    """Methods that vLLM adds to its worker class, for POST /collective_rpc."""

    vllm_config: Any
    weight_transfer_engine: BroadcastWeightEngine
    _weight_update_active: bool

    def mismatched_weights(self, fingerprints: dict[str, str]) -> list[str]:
        """Name the tensors that the last update did not bring as they were sent."""
        return self.weight_transfer_engine.mismatched(fingerprints)

    def abandon_weight_update(self) -> None:
        """Forget an update that never finished. Idempotent."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.abandon()
        self._weight_update_active = False


def _is_news(record: logging.LogRecord) -> bool:
    """Tell whether a layer that got no weights is one that checkpoints have weights for."""
    return record.args != ("RotaryEmbedding",)


logging.getLogger(finalize_layerwise_reload.__module__).addFilter(_is_news)
WeightTransferEngineFactory.register_engine(BACKEND, BroadcastWeightEngine)
