"""Notices that another node of the trainer is gone or cut off, also while this process is stuck in a collective.

torch learns of a node that falls silent only when a collective has taken all its time, which is hours, because ranks
wait that long for rank 0 to collect rollouts; and gloo may miss that its connection was reset. So the first rank of
each node connects to the first rank of every other one, and lets the kernel probe these connections: a process that is
busy, or stopped in a debugger, is not taken for lost. A connection that ends without a goodbye means that its process
was killed or that someone between resets connections.
"""

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from typing import NoReturn

from torch._C._distributed_c10d import Store

from arealite.utils.network import address_toward

logger = logging.getLogger("arealite.hosts")

_EXIT_STATUS = 1
_LOOK_AGAIN_S = 0.2
_GOODBYE = b"."
_links: list[socket.socket] = []  # from other nodes; what is sent there is the goodbye


def watch_hosts(store: Store, master: str, timeout_s: float) -> None:
    """End this process with an error once another node has been silent for `timeout_s`.

    Every rank calls it; `store` is fresh, and `master` is the host of rank 0. The launcher, or torchrun, ends the ranks
    beside the one that ends.
    """
    num_hosts, host = int(os.environ.get("GROUP_WORLD_SIZE", "1")), int(os.environ.get("GROUP_RANK", "0"))
    if num_hosts == 1 or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    listener = socket.create_server((address_toward(master), 0), backlog=num_hosts)
    threading.Thread(target=_accept, args=(listener,), name="watch", daemon=True).start()
    atexit.register(say_goodbye)
    address, port = listener.getsockname()
    store.set(f"watch/{host}", f"{address}:{port} {socket.gethostname()}")
    for other in range(num_hosts):
        if other != host:
            endpoint, _, name = store.get(f"watch/{other}").decode().partition(" ")
            watch = threading.Thread(target=_watch, args=(endpoint, name, timeout_s), name=f"watch-{name}", daemon=True)
            watch.start()


def say_goodbye() -> None:
    """Tell the other nodes that this process may end now."""
    while _links:
        with contextlib.suppress(OSError), _links.pop() as link:
            link.send(_GOODBYE)


def _accept(listener: socket.socket) -> None:
    while True:
        link, _ = listener.accept()
        _links.append(link)


def _watch(endpoint: str, name: str, timeout_s: float) -> None:
    """Watch one node until its process has said goodbye."""
    host, _, port = endpoint.rpartition(":")
    end = "closed"
    try:
        with _connect((host, int(port)), timeout_s) as link:
            _let_kernel_probe(link, timeout_s)
            if link.recv(1) == _GOODBYE:
                return
    except (ConnectionResetError, ConnectionRefusedError):
        end = "reset"
    except OSError as error:
        _end(f"{name} ({host}) must answer within {timeout_s:g} s: got {error}")
    time.sleep(timeout_s)
    _end(f"the trainer on {name} ({host}) must not end before ours: its connection was {end}")


def _connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """Connect although there may be no route for a moment."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            link = socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.1))
        except (ConnectionError, TimeoutError):
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_AGAIN_S)
        else:
            link.settimeout(None)
            return link


def _let_kernel_probe(link: socket.socket, timeout_s: float) -> None:
    """Make the kernel close the connection with an error when its other end is silent for `timeout_s`."""
    interval_s = max(1, int(timeout_s / 5))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * max(timeout_s - interval_s, 1)))


def _end(text: str) -> NoReturn:
    """End this process although its main thread may be stuck in C code."""
    logger.critical("%s. Look after that node and the network, then start the run again.", text)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_EXIT_STATUS)
