"""Publication of weights as one verb: pause -> transfer -> acknowledge -> prove -> resume.

It is the explicit sequence `pause`, `update_weights`, `upload_weights`, `result`, `check_canary`, `resume`,
`set_version`, for users who do not want to change it. Invariant: versions advance only after every server has
acknowledged the new weights and samples from them, in the order servers, rollout, actor; a failure is raised on all
ranks at once, and the versions stay. Only what all ranks agree to have failed is tried again: one that fails alone, in
a collective, ends. Servers that join later, or lost their weights, catch up with the same sequence, which leaves the
others alone and whose failure matters only where there are no others.
"""

from __future__ import annotations

import functools
import logging
from concurrent.futures import Future

import torch.distributed as dist

from arealite.api.engine_api import TrainEngine
from arealite.api.io_struct import WeightUpdateMeta
from arealite.api.run_folder import RunFolder
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.utils import heartbeat
from arealite.utils.distributed import agreed, is_agreed
from arealite.weights.canary import check_canary
from arealite.weights.log import note_weights
from arealite.weights.replay import compare_weights

logger = logging.getLogger("arealite.client")

_MAX_ATTEMPTS = 5
_WIND_UP_S = 60.0
"""In which the receiving half finds out whom it failed by, and lets the others go on."""


def publish_weights(actor: FSDPPPOActor, rollout: RemoteInferenceEngine, version: int) -> None:
    """Give every server the actor's weights as `version` (collective).

    How they travel is `rollout.weight_update`: by broadcast, or through a checkpoint in the run folder; how that is
    verified is `rollout.weight_check`. It is done again without servers that died in it. Raises WeightUpdateError
    within thrice `rollout.weight_update_timeout` seconds and a minute for each attempt, or when no server was there for
    `rollout.setup_timeout` seconds.
    """
    if rollout.config.replay_from:
        compare_weights(actor, rollout.config, version)
    else:
        _publish(actor, rollout, version)
        fingerprint = _log_weights(actor, rollout, version)
        rollout.on_stale = functools.partial(_catch_up, actor, rollout, version, fingerprint)
    rollout.set_version(version)
    rollout.resume()
    actor.set_version(version)


def _catch_up(actor: FSDPPPOActor, rollout: RemoteInferenceEngine, version: int, fingerprint: str) -> None:
    """Publish once more to servers that lack the version, unless the actor has trained since (collective)."""
    if actor.fingerprint() != fingerprint:
        return
    _publish(actor, rollout, version, only_stale=True)
    rollout.admit()


def _publish(actor: FSDPPPOActor, rollout: RemoteInferenceEngine, version: int, *, only_stale: bool = False) -> None:
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        try:
            _publish_once(actor, rollout, _new_update(actor, rollout, version, only_stale=only_stale))
            return
        except Exception as error:
            if not is_agreed(error):
                raise
            next_step = rollout.after_failed_update(only_stale=only_stale, may_repeat=attempt < _MAX_ATTEMPTS)
            if next_step == "no":
                raise
            if dist.get_rank() == 0:
                logger.warning("attempt %d to publish weights %d failed, %s: %s", attempt, version, next_step, error)
            if next_step == "enough":
                return


def _publish_once(actor: FSDPPPOActor, rollout: RemoteInferenceEngine, meta: WeightUpdateMeta) -> None:
    assert meta.version is not None
    received = agreed(lambda: _start_receiving(rollout, meta))
    _transfer(actor, meta, received)
    check_canary(actor, rollout, meta.version)


def _start_receiving(rollout: RemoteInferenceEngine, meta: WeightUpdateMeta) -> Future[None] | None:
    if not meta.only_stale:
        rollout.pause()
    return rollout.update_weights(meta) if dist.get_rank() == 0 else None


def _transfer(actor: TrainEngine, meta: WeightUpdateMeta, received: Future[None] | None) -> None:
    """Send, and wait for the servers also if that fails: they must go on, and their error names one of them."""
    failure: Exception | None = None
    try:
        with heartbeat.waiting("the servers to take new weights", on="servers"):
            actor.upload_weights(meta)
    except Exception as error:
        if not is_agreed(error):
            raise
        failure = error

    def finish() -> None:
        if received is not None:
            with heartbeat.waiting("the servers' new weights", on="servers"):
                received.result(timeout=2 * meta.timeout_s + _WIND_UP_S)
        if failure is not None:
            raise failure

    agreed(finish)


def _log_weights(actor: FSDPPPOActor, rollout: RemoteInferenceEngine, version: int) -> str:
    """Note in the run folder which weights this version is, if that is wanted, and return their fingerprint."""
    fingerprint = actor.fingerprint()
    if dist.get_rank() == 0 and rollout.config.weight_check.fingerprint:
        note_weights(rollout.config, version, fingerprint)
    return fingerprint


def _new_update(
    actor: TrainEngine, rollout: RemoteInferenceEngine, version: int, *, only_stale: bool
) -> WeightUpdateMeta:
    """Describe the update. Requests wait until the servers are proved, who are idle until then and answer at once."""
    config, is_disk = rollout.config, rollout.config.weight_update == "disk"
    path = str(RunFolder(config).weight_update)
    return WeightUpdateMeta(
        "disk" if is_disk else "nccl",
        version=version,
        path=path if is_disk or config.fileroot else None,
        nccl_param_specs=[] if is_disk else actor.get_param_specs(),
        timeout_s=config.weight_update_timeout,
        holds_requests=True,
        only_stale=only_stale,
    )
