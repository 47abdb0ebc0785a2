"""Replay of a training step: publishing weights means comparing them with what the run published as that version.

The run's own script runs again with `rollout.replay_from` set (`arealite replay` arranges that), without servers. Its
batches come from `rollout.account.store`. The first version that differs ends the program.
"""

import torch.distributed as dist

from arealite.api.cli_args import InferenceEngineConfig
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.weights.log import read_weights


def compare_weights(actor: FSDPPPOActor, config: InferenceEngineConfig, version: int) -> None:
    """Compare the actor's weights with the run's of that version (collective).

    Ends the program: with status 1 if they differ, with status 0 after the step to replay.
    """
    expected, found = read_weights(config.replay_from).get(version), actor.fingerprint()
    made = f"step {version - 1} replayed" if version else "nothing replayed yet"
    if found != expected:
        _say(f"{made}: weights of version {version} DIFFER: the run's have the fingerprint {expected}, these {found}")
        raise SystemExit(1)
    if version == config.replay_step + 1:
        _say(f"{made}: weights of version {version} are bit-identical (fingerprint {found})")
        raise SystemExit(0)


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
