"""A weight update as one verb, top to bottom: send and receive, verify, advance versions, resume.

It is the explicit sequence `pause`, `update_weights`, `upload_weights`, `result`, `check_canary`, `resume`,
`set_version`, for users who do not want to change it. Invariant: versions advance only after servers have acknowledged
the new weights and sampled from them, in the order servers, rollout, actor; any failure is raised on all ranks.
"""

from concurrent.futures import Future, wait

import torch.distributed as dist

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.io_struct import WeightUpdateMeta
from arealite.api.run_folder import RunFolder
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.backends import BACKENDS
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.utils import heartbeat
from arealite.utils.distributed import agreed, is_agreed, on_rank_0
from arealite.weights.canary import check_canary
from arealite.weights.log import read_weights, record_weights

_WIND_UP_S = 60.0  # in which the receiving half finds out which servers failed, and resumes the others


def publish_weights(actor: FSDPPPOActor, rollout: RemoteInferenceEngine, version: int) -> None:
    """Give every server the actor's weights as `version` (collective).

    How they travel is `rollout.weight_update`: by broadcast from `rollout.weight_update_senders` ranks, or through a
    checkpoint in the run folder; how that is verified is `rollout.weight_check`. Servers that fail are removed, and it
    is repeated without them. Raises WeightUpdateError if wrong weights arrived (`on_mismatch=stop`), if every server
    refuses them, or if no server can be updated for `rollout.setup_timeout` seconds; one try ends within thrice
    `rollout.weight_update_timeout` and a minute.
    """
    rollout.record_update(actor)
    config, rises = rollout.config, rollout.published is not None and version > rollout.get_version()
    if config.replay_from:
        _compare(actor, config, version)
    else:
        is_logged = config.weight_check.fingerprint and bool(config.fileroot)
        fingerprint = actor.fingerprint() if is_logged else ""  # before anything stops for it
        rollout.pause()
        publication = Publication(actor, rollout, version)
        while not publication.update():
            pass
        if is_logged:
            on_rank_0(lambda: record_weights(config, version, fingerprint, threads=actor.num_threads, rises=rises))
        rollout.published = publication
    rollout.set_version(version)
    rollout.resume()
    actor.set_version(version)


class Publication:
    """Weights of one version, and the actor that sends them; its methods are collective."""

    def __init__(self, actor: FSDPPPOActor, rollout: RemoteInferenceEngine, version: int) -> None:
        self._actor, self._rollout, self._version = actor, rollout, version
        self._num_changes, self._began = actor.num_changes, rollout.now()

    def update_joining(self) -> None:
        """Update the servers that joined since, unless the actor has been trained meanwhile."""
        if self._actor.num_changes == self._num_changes:
            self.update(only_joining=True)

    def update(self, *, only_joining: bool = False) -> bool:
        """Update the servers once; return False if servers failed, without which it may be repeated."""
        actor, rollout = self._actor, self._rollout
        config, is_disk = rollout.config, rollout.config.weight_update == "disk"
        num_senders = config.weight_update_senders or (None if BACKENDS[config.backend].receives_at_once else 1)
        meta = WeightUpdateMeta(
            "disk" if is_disk else "nccl",
            version=self._version,
            path=str(RunFolder(config).weight_update) if is_disk else None,
            nccl_param_specs=[] if is_disk else actor.get_param_specs(num_senders=num_senders),
            sender_group=actor.transfer_group,
            timeout_s=config.weight_update_timeout,
            holds_requests=True,  # until servers are verified; they are idle until then and answer at once
            only_joining=only_joining,
            frozen=actor.frozen_weights,
            meeting_point=actor.meeting_point,
        )
        try:
            receiving = on_rank_0(lambda: rollout.update_weights(meta))  # 1 choose the servers, and pause them
            failure = None
            try:
                with heartbeat.waiting("the servers to take new weights", on="servers"):
                    actor.upload_weights(meta)  # 2 send, while the servers receive
            except Exception as error:
                if not is_agreed(error):
                    _note_servers(error, receiving)
                    raise
                failure = error  # the servers' error names the one that failed
            agreed(lambda: _finish(meta, receiving, failure))
            check_canary(actor, rollout, self._version)  # 3 verify; servers have compared checksums already
            on_rank_0(lambda: rollout.run(rollout.receiver.admit()))  # 4 the servers' versions advance
        except Exception as error:
            if not is_agreed(error):  # it failed on this rank alone: the others wait in a collective
                raise
            failure = error
            on_rank_0(lambda: rollout.run(rollout.receiver.recover(meta, failure, self._began)))
            return False
        return True


def _note_servers(error: Exception, receiving: Future[None] | None) -> None:
    """Add what the servers say to an error of this rank alone: they know of which sender they have lost the rest."""
    if receiving is not None:
        wait([receiving], timeout=_WIND_UP_S)
        error.add_note(f"The servers: {receiving.exception() if receiving.done() else 'no word from them'}")


def _finish(meta: WeightUpdateMeta, receiving: Future[None] | None, failure: Exception | None) -> None:
    """Wait for the receiving half, also if sending failed: the servers must resume."""
    if receiving is not None:
        with heartbeat.waiting("the servers' new weights", on="servers"):
            receiving.result(timeout=2 * meta.timeout_s + _WIND_UP_S)
    if failure is not None:
        raise failure


def _compare(actor: FSDPPPOActor, config: InferenceEngineConfig, version: int) -> None:
    """In a replay (`arealite replay`): compare the weights with what the run published as that version (collective).
    Ends the program: with status 1 if they differ, with status 0 after the step to replay."""
    expected, found = read_weights(config.replay_from).get(version), actor.fingerprint()
    if found == expected and version != config.replay_step + 1:
        return
    made = f"step {version - 1} replayed" if version else "nothing replayed yet"
    same = f"are bit-identical (fingerprint {found})"
    outcome = same if found == expected else f"DIFFER: the run's have the fingerprint {expected}, these {found}"
    if dist.get_rank() == 0:
        print(f"{made}: weights of version {version} {outcome}", flush=True)
    raise SystemExit(int(found != expected))
