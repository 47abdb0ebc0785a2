"""Replay: a step of an earlier run once more, from its stored batches, without servers and bit for bit.

The run's own script runs again with `rollout.replay_from` set (`arealite replay` arranges that). Batches then come from
a `Player`, and publishing weights means comparing them with what the run published under that version, so the first
step that differs is the one that is named. Only what the stored batches do not determine may differ: timing, rollouts.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import torch.distributed as dist
from tensordict import TensorDict

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.rollout.account.stored_batch import read_batches
from arealite.weights.log import read_weights


class Player:
    """Hands out the batches of a run again, in their order. Lives on rank 0."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder) / "rollouts"
        self._unplayed: dict[str, deque[TensorDict]] = {}

    def play(self, version: int, *, is_evaluation: bool = False) -> TensorDict:
        """Return the next batch that was handed out at this version."""
        path = self._folder / f"{'eval_' * is_evaluation}step_{version}.jsonl"
        if path.name not in self._unplayed:
            self._unplayed[path.name] = deque(read_batches(path) if path.exists() else [])
        if not self._unplayed[path.name]:
            raise ConfigError(
                f"{path} must hold each batch that the script asks for: got no more. "
                "Replay with the script and config of the run."
            )
        return self._unplayed[path.name].popleft()


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
