"""A weight transfer engine for vLLM, and methods for its workers, which import this module as their extension.

vLLM's own engines transfer GPU tensors only and wait without a deadline; this one uses the broadcast group of
`utils.weight_transfer`, on gloo or NCCL. Invariant: a failed bucket closes the group, which fails the sender at once,
and leaves every layer with all of its new or all of its old weights; the next update makes the model consistent.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from arealite.utils.fingerprint import differing, fingerprints
from arealite.utils.weight_transfer import BroadcastGroup, are_of_one_update, close_group, join_group, receive_buckets

BACKEND = "arealite"  # name of the engine in vLLM's --weight-transfer-config


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """A broadcast group to join, that of one sender; worker `i` of this server is rank `rank_offset + i`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: Literal["gloo", "nccl"]
    timeout_s: float  # deadline of joining, and of each bucket


@dataclass
class TensorsInfo(WeightTransferUpdateInfo):
    """The tensors of an update, in order of arrival."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: list[str]  # of each tensor
    bucket_sizes: list[int]  # in tensors


class BroadcastWeightEngine(WeightTransferEngine[GroupInfo, TensorsInfo]):
    """Receives buckets from the senders of an update, each rank 0 of a broadcast group, into one worker's model."""

    init_info_cls = GroupInfo
    update_info_cls = TensorsInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._groups: dict[str, BroadcastGroup] = {}
        self.received: dict[str, str] = {}  # fingerprint of each tensor, of the last update that brought it

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Join a group; leave those of another update."""
        if not are_of_one_update(init_info.group_name, *self._groups):
            self.shutdown()
        with self._failing_together():
            parallel = self.parallel_config
            self._groups[init_info.group_name] = join_group(
                init_info.master_address,
                init_info.master_port,
                init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank,
                init_info.world_size,
                init_info.group_name,
                backend=init_info.backend,
                timeout_s=init_info.timeout_s,
            )

    def start_weight_update(self) -> None:
        """Make vLLM buffer the tensors of each layer until the layer is complete."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive bucket by bucket and load each."""
        with self._failing_together():
            self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: TensorsInfo) -> None:
        """Receive the tensors, record their fingerprints and load them, with the memory of a bucket."""
        if missing := set(update_info.group_name) - self._groups.keys():
            raise ConnectionError(
                f"a broadcast group must be open: got {', '.join(missing)}. POST /init_weight_transfer_engine first."
            )
        specs = zip(update_info.names, update_info.shapes, update_info.dtypes, strict=True)
        groups = [self._groups[name] for name in update_info.group_name]
        for bucket in receive_buckets(groups, specs, update_info.bucket_sizes):
            self.received |= fingerprints(bucket)
            self.model.load_weights(bucket.items())
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            del bucket  # before the next comes

    def finish_weight_update(self) -> None:
        """Finish the layers that vLLM loads last; those that a partial update leaves out keep their weights."""
        finalize_layerwise_reload(self.model, self.model_config)

    def abandon(self) -> None:
        """Restore the old weights of incomplete layers. Idempotent."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Make all workers fail if one does, and only the last one raise.

        vLLM stops reading replies at the first error, and would take the unread ones for replies to its next call.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
            self.shutdown()  # the others may wait for the next bucket, which must fail, too
        errors: list[Any] = [None] * get_world_group().world_size
        dist.all_gather_object(errors, error and f"{type(error).__name__}: {error}", group=get_world_group().cpu_group)
        if cause := "; ".join(dict.fromkeys(filter(None, errors))):
            self.shutdown()
            self.abandon()
            if self.parallel_config.rank == self.parallel_config.world_size - 1:
                raise RuntimeError(cause) from error

    def shutdown(self) -> None:
        """Leave the groups. Idempotent."""
        while self._groups:
            close_group(self._groups.popitem()[1])


class WorkerExtension:
    """Methods that vLLM adds to its worker class, for POST /collective_rpc."""

    vllm_config: Any
    weight_transfer_engine: BroadcastWeightEngine
    _weight_update_active: bool

    def mismatched_weights(self, fingerprints: dict[str, str]) -> list[str]:
        """Return the tensors whose fingerprints differ from the sender's, also those that earlier updates brought."""
        return differing(self.weight_transfer_engine.received, fingerprints)

    def abandon_weight_update(self) -> None:
        """Drop an unfinished update. Idempotent."""
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.abandon()
        self._weight_update_active = False


# It warns of every layer that received no weights, as partial updates leave most of them out.
logging.getLogger(finalize_layerwise_reload.__module__).setLevel(logging.ERROR)
WeightTransferEngineFactory.register_engine(BACKEND, BroadcastWeightEngine)
