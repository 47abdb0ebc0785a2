"""The errors users meet, and the exit statuses by which launchers and their processes report them.

Each message reads `<what> must <rule>: got <value>. <what to change>`. A process that ends on purpose says why by its
status alone: nothing is read from logs. Any other status of a trainer's rank is passed on as it is, and 128 + n is
signal n.
"""

import sys
from typing import Literal

REFUSED = 2
"""The config, a checkpoint or the ledger can't be used as it is: a restart would end alike."""
SERVER_FAILED = 3
STALLED = 4
NODE_LOST = 5
PEER_LOST = 6
"""A rank failed because its connection to another rank ended; the other rank has the cause."""

_PEER_LOST = ("reset by peer", "closed by peer", "Broken pipe", "gloo/transport", "NCCL communicator was aborted")


class AReaLiteError(Exception):
    """Base of our own errors."""

    kind: str = "workflow"
    """What an episode that fails with it is counted as, in `rollout/failed_<kind>`."""


class ConfigError(AReaLiteError, ValueError):
    """A configuration that can't run."""


class ServerError(AReaLiteError, RuntimeError):
    """An inference server was unreachable or answered with an error; names server, endpoint, status and body."""

    kind = "server_error"


class UnreachableError(ServerError):
    """No connection to a server, or one that broke before the whole answer had come."""

    kind = "server_unreachable"


class ContextOverflowError(ServerError):
    """A prompt leaves no room in the server's context; trying again can't help."""

    kind = "context_overflow"


class EnvError(AReaLiteError, RuntimeError):
    """The environment or tool that an episode talks to failed; workflows raise it to tell this from a bug of theirs."""

    kind = "environment"


class AgentError(AReaLiteError, RuntimeError):
    """An agent failed: its process, its command, or what it returned."""

    kind = "agent"


class ParseError(AReaLiteError, ValueError):
    """What a model wrote could not be parsed; workflows raise it when that ends the episode."""

    kind = "parse"


class EpisodeError(AReaLiteError, RuntimeError):
    """Episodes failed more often than allowed; the cause is the last failure."""


class AbandonedError(AReaLiteError, RuntimeError):
    """The external client left: the episode is rejected for `reason` and counts against no failure budget."""

    def __init__(self, reason: Literal["abandoned", "gone"]) -> None:
        super().__init__(f"an external client must finish its episode: got none ({reason}).")
        self.reason = reason


class EpisodeTimeoutError(AReaLiteError, TimeoutError):
    """An episode ran past its deadline."""

    kind = "timeout"


class RewardError(AReaLiteError, RuntimeError):
    """A reward function raised, ran past its deadline, returned something that is not a finite number, or died."""

    def __init__(
        self, message: str, kind: Literal["exception", "timeout", "contract", "crash"] = "exception", place: str = ""
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.place = place
        """The user's line that raised, else the one that defines the function."""


class TrajectoryError(AReaLiteError, ValueError):
    """A workflow returned a trajectory that breaks the contract of `RolloutWorkflow`; names the key."""

    kind = "trajectory"


class WeightUpdateError(AReaLiteError, RuntimeError):
    """New weights did not reach every server."""


class CheckpointError(AReaLiteError, RuntimeError):
    """A checkpoint is missing or incomplete."""


class GroupLostError(AReaLiteError, RuntimeError):
    """A group of workers can't continue: a worker ended, failed alone, or did not answer in time."""


class WorkerLostError(AReaLiteError, RuntimeError):
    """The process that ran an episode ended; the prompt is issued again, and no budget counts it."""

    kind = "worker_lost"


class LedgerError(AReaLiteError, RuntimeError):
    """The ledger of a run can't be written or read, or does not reach as far as asked."""


def require(holds: bool, sentence: str) -> None:
    """Raise ConfigError with `sentence` unless the condition holds."""
    if not holds:
        raise ConfigError(sentence)


def require_linux() -> None:
    """Raise ConfigError elsewhere: processes, signals and networks are handled as only Linux can."""
    if sys.platform != "linux":
        raise ConfigError(
            f"AReaLite must run on Linux: got {sys.platform}. Use WSL2 on Windows, a container (Docker) elsewhere."
        )


def exit_status_of(error: BaseException | None) -> int | None:
    """Return the status by which a process ends on purpose with this error; None leaves it to Python."""
    while error is not None:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ConfigError | CheckpointError | LedgerError):
            return REFUSED
        is_of_torch = isinstance(error, RuntimeError) and not isinstance(error, AReaLiteError)
        if is_of_torch and any(words in str(error) for words in _PEER_LOST):
            return PEER_LOST
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None
