"""Publication of weights as one verb: pause -> transfer -> acknowledge -> prove -> resume.

It is the explicit sequence `pause`, `update_weights`, `upload_weights`, `result`, `check_canary`, `resume`,
`set_version`, for users who do not want to change it. Invariant: versions advance only after every server has
acknowledged the new weights and samples from them, in the order servers, rollout, actor; a failure on one rank is
raised on all at once, and the versions stay.
"""

from __future__ import annotations

import os
from concurrent.futures import Future

import torch.distributed as dist

from arealite.api.engine_api import TrainEngine
from arealite.api.io_struct import WeightUpdateMeta
from arealite.engine.canary import check_canary
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.remote_client import RemoteInferenceEngine
from arealite.engine.replay import compare_weights
from arealite.engine.weight_log import note_weights
from arealite.utils import beacon
from arealite.utils.distributed import agreed


def publish_weights(actor: FSDPPPOActor, rollout: RemoteInferenceEngine, version: int) -> None:
    """Give every server the actor's weights as `version` (collective).

    How they travel is `rollout.weight_update`: by broadcast, or through a checkpoint in the run folder; how that is
    verified is `rollout.weight_check`. Raises WeightUpdateError within thrice `rollout.weight_update_timeout` seconds.
    """
    if rollout.config.replay_from:
        compare_weights(actor, rollout.config, version)
    else:
        _publish(actor, rollout, version)
    rollout.set_version(version)
    rollout.resume()
    actor.set_version(version)


def _start_receiving(rollout: RemoteInferenceEngine, meta: WeightUpdateMeta) -> Future[None] | None:
    rollout.pause()
    return rollout.update_weights(meta) if dist.get_rank() == 0 else None


def _transfer(actor: TrainEngine, meta: WeightUpdateMeta, received: Future[None] | None) -> None:
    """Send, and wait for the servers also if that fails: they must go on, and their error names one of them."""
    try:
        with beacon.waiting("the servers to take new weights", on="servers"):
            actor.upload_weights(meta)
    finally:
        if received is not None:
            with beacon.waiting("the servers' new weights", on="servers"):
                received.result(timeout=2 * meta.timeout_s)


def _publish(actor: FSDPPPOActor, rollout: RemoteInferenceEngine, version: int) -> None:
    meta = _new_update(actor, rollout, version)
    received = agreed(lambda: _start_receiving(rollout, meta))
    agreed(lambda: _transfer(actor, meta, received))
    check_canary(actor, rollout, version)
    if rollout.config.weight_check.fingerprint:
        _log_weights(actor, rollout, version)


def _log_weights(actor: FSDPPPOActor, rollout: RemoteInferenceEngine, version: int) -> None:
    """Note in the run folder which weights this version is."""
    fingerprint = actor.fingerprint()
    if dist.get_rank() == 0:
        note_weights(rollout.config, version, fingerprint)


def _new_update(actor: TrainEngine, rollout: RemoteInferenceEngine, version: int) -> WeightUpdateMeta:
    """Describe the update. Requests wait until the servers are proved, who are idle until then and answer at once."""
    config, is_disk = rollout.config, rollout.config.weight_update == "disk"
    path = os.path.join(config.fileroot, config.experiment_name, config.trial_name, "weight_update")
    return WeightUpdateMeta(
        "disk" if is_disk else "nccl",
        version=version,
        path=path if is_disk else None,
        nccl_param_specs=[] if is_disk else actor.get_param_specs(untie_embeddings=config.untie_embeddings),
        timeout_s=config.weight_update_timeout,
        holds_requests=True,
        untie_embeddings=config.untie_embeddings,
    )
