"""What a launcher starts and where: a job, the slot on some node in which it runs, and the place that gives slots.

A slot is taken before its job is known, because a job needs the addresses of the others. Launchers differ only in
their places; everything above (`supervise`) knows this file alone.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from arealite.api.cli_args import BaseExperimentConfig
from arealite.launcher.plan.plan import Placement, Plan
from arealite.utils.network import LOOPBACK


@dataclass(frozen=True)
class Job:
    """One command; `env` is added to the environment of the node it runs on."""

    name: str
    command: list[str]
    env: dict[str, str]
    folder: str = field(default_factory=os.getcwd)  # on every node that of the launcher, to which paths may be relative


class NodeLostError(RuntimeError):
    """The node of a job is gone or silent; what became of the job is unknown."""


class Slot(Protocol):
    """Room for one job on some node. Nothing that the job starts outlives it."""

    address: str  # address by which the nodes of the run reach this one
    port: int  # a port that is kept free until the job binds it
    gpus: Sequence[str]  # names of the GPUs that are reserved, as CUDA_VISIBLE_DEVICES spells them

    async def run(self, job: Job, output: Callable[[bytes], None]) -> int:
        """Run a job to its end and return its exit status; NodeLostError if that can't be known."""

    def terminate(self) -> None:
        """Send the job SIGTERM; one that has not begun yet never does."""

    def kill(self) -> None:
        """SIGKILL the job with all its descendants; if its node is gone, return from `run` all the same."""

    async def close(self) -> None:
        """Give the slot back, after `run` has ended or was cancelled; nothing of the job is left."""


class Place:
    """The nodes of a run; each launcher has its own class. It is opened and closed once per attempt."""

    is_here = False
    """Whether they are this node alone."""

    def check(self, config: BaseExperimentConfig, plan: Plan) -> None:
        """Raise ConfigError if the nodes can't run the plan, before anything starts."""

    def registry_host(self, plan: Plan) -> str:
        """Return the address of this node by which the jobs of a plan reach the run's registry."""
        return LOOPBACK

    def open(self, config: BaseExperimentConfig, plan: Plan, log: Callable[[str], None]) -> None:
        """Ask for the nodes of a plan, without waiting; `log` shows later waits to the user."""

    async def take(self, placements: Sequence[Placement]) -> Sequence[Slot]:
        """Take a slot for each placement; raises TimeoutError, ConfigError or NodeLostError."""
        raise NotImplementedError

    async def close(self) -> None:
        """Give everything back."""

    def nodes_answer(self) -> bool:
        """Return whether a run that lost a node may restart on its nodes or on their replacements."""
        return True
