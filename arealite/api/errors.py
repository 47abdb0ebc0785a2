"""The errors users meet. Each message reads `<what> must <rule>: got <value>. <what to change>`."""


class AReaLiteError(Exception):
    """Base of our own errors."""


class ConfigError(AReaLiteError, ValueError):
    """A configuration that can't run."""


class ServerError(AReaLiteError, RuntimeError):
    """An inference server was unreachable or answered with an error; names server, endpoint, status and body."""


class EpisodeError(AReaLiteError, RuntimeError):
    """Episodes failed more often than allowed; the cause is the last failure."""


class EpisodeTimeoutError(AReaLiteError, TimeoutError):
    """An episode ran past its deadline."""


class RewardError(AReaLiteError, RuntimeError):
    """A reward function raised, ran past its deadline or returned something that is not a finite number."""


class WeightUpdateError(AReaLiteError, RuntimeError):
    """New weights did not reach every server."""


class CheckpointError(AReaLiteError, RuntimeError):
    """A checkpoint is missing or incomplete."""
