"""Ports for servers that tests start: unlike a free one, a held one is given to nobody else meanwhile."""

from __future__ import annotations

import socket

from arealite.utils.network import hold_port, port_of

_holders: list[socket.socket] = []


def held_port() -> int:
    """Return a port of loopback that is ours until the tests end."""
    _holders.append(hold_port())
    return port_of(_holders[-1])
