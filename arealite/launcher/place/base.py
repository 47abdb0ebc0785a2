"""What a launcher starts and where: a job, and the slot on some node in which it runs.

A slot is taken before its job is known, because jobs must be told each other's addresses. Local, Ray and Slurm differ
only in how they give slots; everything above (`supervise`) knows this file alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from arealite.launcher.plan.plan import Placement


@dataclass(frozen=True)
class Job:
    """One command; `env` is added to the environment of the node it runs on."""

    name: str
    command: list[str]
    env: dict[str, str]
    folder: str = field(default_factory=os.getcwd)
    """Working directory on every node: that of the launcher, to which paths may be relative."""


class NodeLostError(RuntimeError):
    """The node of a job is gone or silent; what became of the job is unknown."""


class Slot(Protocol):
    """Room for one job on some node. Nothing that the job starts outlives it."""

    node: str
    """Name of the node, for messages."""
    address: str
    """Address by which the nodes of the run reach this one."""
    port: int
    """A port that is kept free until the job binds it."""
    gpus: Sequence[str]
    """Names of the GPUs that are reserved, as CUDA_VISIBLE_DEVICES spells them."""

    async def run(self, job: Job, output: Callable[[bytes], None]) -> int:
        """Run a job to its end and return its exit status; NodeLostError if that can't be known."""

    def terminate(self) -> None:
        """Send the job SIGTERM."""

    def kill(self) -> None:
        """SIGKILL the job with all its descendants; if its node is gone, return from `run` all the same."""

    async def close(self) -> None:
        """Give the slot back, after `run` has ended or was cancelled; nothing of the job is left."""


class Place(Protocol):
    """The nodes of a run, and how to take slots there."""

    async def take(self, placements: Sequence[Placement]) -> list[Slot]:
        """Take a slot for each placement; TimeoutError or ConfigError tell what is missing."""

    async def close(self) -> None:
        """Give everything back."""
