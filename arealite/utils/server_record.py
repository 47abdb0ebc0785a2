"""What an inference server tells the trainers of its run: where it is and how it is.

The server's side writes it under `servers_root`, with a lease; trainers watch. Invariant: `ready` was answered by the
server itself, at this address.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Literal

from arealite.utils.secret import sign, verify

State = Literal["loading", "ready", "leaving"]


@dataclass(frozen=True)
class ServerRecord:
    """One registered server."""

    address: str
    """host:port"""
    backend: str
    node: str
    """Name of its machine."""
    pid: int
    """Of the program that runs it: another one is another server, even at the same address."""
    state: State
    detail: str
    """What it is doing; of one that loads, the last line of its log."""
    since: float
    """When the state began, in Unix time."""

    def to_text(self, key: str, secret: str | None) -> str:
        """Return the text of the entry `key`."""
        return sign(key, asdict(self), secret)

    @staticmethod
    def read(key: str, text: str, secret: str | None) -> ServerRecord:
        """Read the text of the entry `key`. Raises ValueError for what is not signed or not a record."""
        record = verify(key, text, secret)
        if record.keys() != {field.name for field in fields(ServerRecord)}:
            raise ValueError(f"the entry {key} must be the record of a server: got {text[:200]!r}")
        return ServerRecord(**record)


def servers_root(experiment: str, trial: str) -> str:
    """Return where the servers of a run register, each by its name."""
    return f"{experiment}/{trial}/servers"
