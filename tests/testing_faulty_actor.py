"""A policy and a critic that a fault befalls once at each place of PLACES, in a module that workers can import."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from testing_groups import strike

from arealite.api.io_struct import SaveLoadMeta, WeightUpdateMeta
from arealite.engine import fsdp_weights
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.ppo.critic import FSDPPPOCritic
from arealite.utils.files import FileEntry

PLACES = "AREAL_TEST_FAULTS"
"""Variable: a folder with an empty file for each place, `<role>-<call>-<version>-<rank>-<fault>`, which is removed.

The version of a critic counts how often its weights have changed: when it was loaded, and in each optimizer step."""


class FaultyActor(FSDPPPOActor):
    """The policy, or its reference."""

    def compute_logprobs(self, batch: TensorDict, *, whole: bool = False) -> Any:
        self._maybe("logprobs")
        return super().compute_logprobs(batch, whole=whole)

    def compute_advantages(self, batch: TensorDict) -> None:
        super().compute_advantages(batch)
        self._maybe("advantages")

    def ppo_update(self, batch: TensorDict) -> dict[str, float]:
        metrics = super().ppo_update(batch)
        self._maybe("update")  # its weights are new, and nobody knows
        return metrics

    def save(self, meta: SaveLoadMeta) -> None:
        self._maybe("save")
        super().save(meta)

    def _write_files(self, folder: Path, state: dict[str, Any], rng: dict[str, Any]) -> dict[str, FileEntry]:
        files = super()._write_files(folder, state, rng)
        self._maybe("write")  # its part is on the disk, and the checkpoint has no manifest yet
        return files

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        self._maybe("upload")
        send = fsdp_weights.send_bucket

        def send_half(group: Any, tensors: list[Any], **more: Any) -> None:
            send(group, tensors[: len(tensors) // 2], **more)
            self._maybe("transfer")
            send(group, tensors[len(tensors) // 2 :], **more)

        fsdp_weights.send_bucket = send_half
        try:
            super().upload_weights(meta)
        finally:
            fsdp_weights.send_bucket = send

    def fingerprint(self) -> str:
        self._maybe("fingerprint")
        return super().fingerprint()

    def _maybe(self, call: str) -> None:
        strike_at("ref" if self.config.optimizer is None else "actor", call, self._version)


class FaultyCritic(FSDPPPOCritic):
    """The critic."""

    def compute_values(self, batch: TensorDict) -> torch.Tensor:
        strike_at("critic", "values", self.num_changes)
        return super().compute_values(batch)

    def ppo_update(self, batch: TensorDict) -> dict[str, float]:
        metrics = super().ppo_update(batch)
        strike_at("critic", "update", self.num_changes)
        return metrics


def strike_at(role: str, call: str, version: int) -> None:
    for place in Path(os.environ[PLACES]).glob(f"{role}-{call}-{version}-{dist.get_rank()}-*"):
        place.unlink()
        strike(place.name.rpartition("-")[2])
