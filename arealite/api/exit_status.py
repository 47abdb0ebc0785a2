"""The exit statuses of launchers and of the processes that they start.

A process that ends on purpose says why by its status alone: nothing is read from logs. Any other status of a trainer's
rank is passed on as it is, and 128 + n is signal n.
"""

from arealite.api.errors import AReaLiteError, CheckpointError, ConfigError, LedgerError

REFUSED = 2
"""The config, a checkpoint or the ledger can't be used as it is: a restart would end alike."""
SERVER_FAILED = 3
STALLED = 4
NODE_LOST = 5
PEER_LOST = 6
"""A rank failed because its connection to another rank ended; the other rank has the cause."""

_PEER_LOST = ("reset by peer", "closed by peer", "Broken pipe", "gloo/transport", "NCCL communicator was aborted")


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
