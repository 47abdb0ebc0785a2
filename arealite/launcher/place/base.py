"""What a launcher starts, and the place where it runs: a job, a seat for it on some machine, and what it tells.

A seat is taken before its job is known, because jobs must be told the addresses of each other's machines. Local, Ray
and Slurm differ only in how they give seats; everything above (`supervisor`) knows this file alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from arealite.launcher.plan.plan import Placement


@dataclass(frozen=True)
class Job:
    """One command; `env` is what its environment has besides that of the machine it runs on."""

    name: str
    command: list[str]
    env: dict[str, str]
    ranks: list[int] = field(default_factory=list)
    """Ranks of the trainer that the command starts, each with an output of its own (see `rank`)."""
    folder: str = field(default_factory=os.getcwd)
    """Where it runs, on every machine: that of the launcher, to which paths may be relative."""


class NodeLostError(RuntimeError):
    """The machine of a job is gone or silent; what became of the job is unknown."""


class Listener(Protocol):
    """Who hears what a job and its ranks write, and how ranks end."""

    def output(self, name: str, data: bytes) -> None:
        """Take in output of the job (its name) or of a rank (`trainer-<rank>`)."""

    def rank_ended(self, rank: int, status: int) -> None:
        """Learn the exit status of a rank at once, long before its job ends."""


class Seat(Protocol):
    """A place for one job on some machine. Nothing it started outlives it."""

    node: str
    """Name of the machine, for messages."""
    address: str
    """By which the machines of the run reach this one."""
    port: int
    """Free there, and kept free until the job binds it."""

    async def run(self, job: Job, listener: Listener) -> int:
        """Run a job to its end and return its exit status; NodeLostError if that can't be known."""

    def terminate(self) -> None:
        """Send the job SIGTERM."""

    def kill(self) -> None:
        """SIGKILL the job with all its descendants; if its machine is gone, return from `run` all the same."""

    async def close(self) -> None:
        """Give the seat back, after `run` has ended or was cancelled; nothing of the job is left."""


class Place(Protocol):
    """The machines of a run, and how to get seats there."""

    async def seats(self, placements: Sequence[Placement]) -> list[Seat]:
        """Get a seat for each placement, whatever the order; TimeoutError or ConfigError tell what is missing."""

    async def close(self) -> None:
        """Give everything back."""
