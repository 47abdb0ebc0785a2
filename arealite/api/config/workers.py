"""Worker groups of Core: which roles have processes of their own, and how many."""

from typing import Literal

from arealite.api.config.types import ConfigBase, NonNegativeInt, Positive, PositiveInt

Strategy = Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]


class RoleConfig(ConfigBase):
    """The workers of one role. A role that says nothing lies with the first one, as in a script of ranks."""

    ranks: PositiveInt | None = None
    """Workers of a group of its own; None takes the trainer's part of `allocation_mode`, or shares the first group."""
    share: str | None = None
    """Role with whose workers this one takes turns; None is a group of its own if `ranks` is given."""
    strategy: Strategy = "PACK"
    """How Ray places the workers on nodes."""
    threads: PositiveInt | None = None
    """CPU threads of each worker; None shares the cores out, as the launcher does for ranks."""


class RolloutWorkersConfig(ConfigBase):
    """Processes that run the training episodes of a declared graph."""

    num: NonNegativeInt = 0
    """How many, on any nodes; 0 is the master itself, which always keeps the account and runs evaluations."""


class WorkersConfig(ConfigBase):
    """Groups of workers on Ray, which a master tells what to do."""

    actor: RoleConfig = RoleConfig()
    """The policy."""
    critic: RoleConfig = RoleConfig()
    """The critic."""
    ref: RoleConfig = RoleConfig()
    """The reference."""
    teacher: RoleConfig = RoleConfig()
    """The teacher of a distillation."""
    model: RoleConfig = RoleConfig()
    """The model of an experiment without reinforcement learning."""
    rollout: RolloutWorkersConfig = RolloutWorkersConfig()
    """Episodes."""
    call_timeout: Positive = 7200.0
    """Seconds that a call may take before its group counts as lost."""
    restarts: NonNegativeInt = 3
    """How often a group that is lost may be started again between two checkpoints."""
