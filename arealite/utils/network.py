"""Ports and addresses of this machine.

A port that is only *found* can be taken by another process before its user binds it. `hold_port` therefore keeps a
bound socket that does not listen: the kernel gives its port to nobody who asks for any port, while a server that names
the port and sets SO_REUSEADDR (asyncio, uvicorn and torch's TCPStore do) can still bind and listen.
"""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


def hold_port(host: str = LOOPBACK) -> socket.socket:
    """Reserve a free port until the returned socket is closed; `port_of` tells which."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    return holder


def port_of(holder: socket.socket) -> int:
    """Return the port a socket is bound to."""
    port: int = holder.getsockname()[1]
    return port


def free_port(host: str = LOOPBACK) -> int:
    """Return a port that is free now, for a server that binds it at once in this process."""
    with hold_port(host) as holder:
        return port_of(holder)


def host_ip() -> str:
    """Return the address by which other machines reach this one; loopback without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: UDP connect only picks a route, nothing is sent
        except OSError:
            return LOOPBACK
        address: str = probe.getsockname()[0]
        return address
