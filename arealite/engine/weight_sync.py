"""Publication of weights as one verb: pause -> transfer -> acknowledge -> resume.

It is the explicit sequence `pause`, `update_weights`, `upload_weights`, `result`, `resume`, `set_version`, for users
who do not want to change it. Invariant: versions advance only after every server has acknowledged the new weights, in
the order servers, rollout, actor; a failure on one rank is raised on all at once, and the versions stay.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist

from arealite.api.engine_api import TrainEngine
from arealite.api.io_struct import WeightUpdateMeta
from arealite.engine.remote_client import RemoteInferenceEngine
from arealite.utils.distributed import raise_on_every_rank

T = TypeVar("T")


def publish_weights(actor: TrainEngine, rollout: RemoteInferenceEngine, version: int) -> None:
    """Give every server the actor's weights as `version` (collective).

    How they travel is `rollout.weight_update`: by broadcast, or through a checkpoint in the run folder. Raises
    WeightUpdateError within twice `rollout.weight_update_timeout` seconds.
    """
    meta = _new_update(actor, rollout, version)
    received = _agreed(lambda: _start_receiving(rollout, meta))
    _agreed(lambda: _transfer(actor, meta, received))
    rollout.set_version(version)
    rollout.resume()
    actor.set_version(version)


def _start_receiving(rollout: RemoteInferenceEngine, meta: WeightUpdateMeta) -> Future[None] | None:
    rollout.pause()
    return rollout.update_weights(meta) if dist.get_rank() == 0 else None


def _transfer(actor: TrainEngine, meta: WeightUpdateMeta, received: Future[None] | None) -> None:
    """Send, and wait for the servers also if that fails: they must go on, and their error names one of them."""
    try:
        actor.upload_weights(meta)
    finally:
        if received is not None:
            received.result(timeout=2 * meta.timeout_s)


def _agreed(action: Callable[[], T]) -> T:
    """Run one phase on this rank, and raise on every rank if it failed on any (collective)."""
    try:
        outcome = action()
    except Exception as error:
        raise_on_every_rank(error)
        raise
    raise_on_every_rank(None)
    return outcome


def _new_update(actor: TrainEngine, rollout: RemoteInferenceEngine, version: int) -> WeightUpdateMeta:
    config = rollout.config
    if config.weight_update == "disk":
        path = os.path.join(config.fileroot, config.experiment_name, config.trial_name, "weight_update")
        return WeightUpdateMeta("disk", version=version, path=path, timeout_s=config.weight_update_timeout)
    return WeightUpdateMeta(
        "nccl",
        version=version,
        nccl_param_specs=actor.get_param_specs(),
        timeout_s=config.weight_update_timeout,
    )
