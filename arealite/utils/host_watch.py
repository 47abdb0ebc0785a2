"""Notices that another machine of the trainer is gone or cut off, also while this process is stuck in a collective.

torch learns of a dead process at once, as its connections close; of a machine that falls silent only when a collective
has taken all its time, which is hours, because ranks wait that long for rank 0 to collect rollouts. So the first rank
of each machine connects to the first rank of every other one, and lets the kernel probe these connections.

Invariant: no process of ours takes part in a probe, so one that is busy, or stopped in a debugger, is not taken for
lost; the kernel also answers for a listener that never accepts. A connection that is closed belongs to a process that
has ended, which is torch's business, or was reset by someone between, and is made anew.
"""

from __future__ import annotations

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
_listeners: list[socket.socket] = []
"""Kept open to the end of the process."""


def watch_hosts(store: Store, master: str, timeout_s: float) -> None:
    """End this process with an error once another machine has been silent for `timeout_s`.

    Every rank calls it after torchrun has started it; `store` is fresh, and `master` is the host of rank 0. The ranks
    beside the one that ends are ended by their torchrun.
    """
    num_hosts, host = int(os.environ.get("GROUP_WORLD_SIZE", "1")), int(os.environ.get("GROUP_RANK", "0"))
    if num_hosts == 1 or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    listener = socket.create_server((address_toward(master), 0), backlog=num_hosts)
    _listeners.append(listener)
    address, port = listener.getsockname()
    store.set(f"watch/{host}", f"{address}:{port} {socket.gethostname()}")
    for other in range(num_hosts):
        if other != host:
            endpoint, _, name = store.get(f"watch/{other}").decode().partition(" ")
            watch = threading.Thread(target=_watch, args=(endpoint, name, timeout_s), name=f"watch-{name}", daemon=True)
            watch.start()


def _watch(endpoint: str, name: str, timeout_s: float) -> None:
    """Watch one machine until its process has ended."""
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=max(deadline - time.monotonic(), 0.1)) as link:
                _let_kernel_probe(link, timeout_s)
                link.settimeout(None)
                link.recv(1)  # nothing is ever sent, so it returns when the other side closes
            return
        except ConnectionResetError:
            deadline = time.monotonic() + timeout_s
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                return
        except OSError as error:
            if time.monotonic() > deadline or isinstance(error, TimeoutError):
                _end(f"{name} ({host}) must answer within {timeout_s:g} s: got {error}")
        time.sleep(_LOOK_AGAIN_S)


def _let_kernel_probe(link: socket.socket, timeout_s: float) -> None:
    """Make the kernel close the connection with an error when its other end is silent for `timeout_s`."""
    interval_s = max(1, int(timeout_s / 5))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * max(timeout_s - interval_s, 1)))


def _end(text: str) -> NoReturn:
    """End this process although its main thread may be stuck in C code."""
    logger.critical("%s. That machine is gone or cut off: look after it, then start the run again.", text)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_EXIT_STATUS)
