"""Ports and addresses of this node.

`hold_port` keeps a bound socket that does not listen: the kernel then never assigns the port, while a server that names
it and sets SO_REUSEADDR (asyncio, uvicorn, TCPStore) can still bind.
"""

import re
import socket
from collections.abc import Iterable

import psutil

LOOPBACK = "127.0.0.1"
_ADDRESS = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):([1-9][0-9]{0,4})", re.ASCII)


def check_address(address: str) -> str:
    """Return the address if it is `host:port`, with brackets around IPv6. Raises ValueError."""
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[2]) > 65535:
        raise ValueError(f"an address must be host:port: got {address!r}. Write e.g. 10.0.0.1:8000 or [fe80::1]:8000.")
    return address


def addresses_in(text: str | Iterable[str]) -> list[str]:
    """Return `host:port` items of a list or comma-separated string, without scheme and final slash; or ValueError."""
    items = text.split(",") if isinstance(text, str) else text
    return [check_address(item.strip().removeprefix("http://").rstrip("/")) for item in items if item.strip()]


def hold_port(host: str = "0.0.0.0", port: int = 0) -> socket.socket:
    """Reserve a port (0: any free one) until the returned socket is closed. Raises OSError.

    A store of torch listens at all addresses, so a port that is held at one of them may be taken from it at another.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, port))
    return holder


def port_of(holder: socket.socket) -> int:
    return holder.getsockname()[1]


def host_ip(toward: str = "192.0.2.1") -> str:
    """Return this node's address as seen from `toward` (default: any other node); loopback without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((toward, 9))  # UDP connect only picks a route; the default address is reserved
        except OSError:
            return LOOPBACK
        return probe.getsockname()[0]


def address_toward(peer: str) -> str:
    """Return this node's address as seen from `peer`, also if the name of `peer` resolves to loopback."""
    own = {address for addresses in _addresses().values() for address in addresses}
    return next((ip for ip in (host_ip(peer), host_ip(), *sorted(own)) if not ip.startswith("127.")), LOOPBACK)


def interface_of(address: str) -> str | None:
    """Return the interface of this node that has this address."""
    return next((name for name, addresses in _addresses().items() if address in addresses), None)


def _addresses() -> dict[str, list[str]]:
    interfaces = psutil.net_if_addrs().items()
    return {name: [a.address for a in addresses if a.family == socket.AF_INET] for name, addresses in interfaces}
