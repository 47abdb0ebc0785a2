"""Notices that another node of the trainer is gone or cut off, also while this process is stuck in a collective.

torch learns of a node that falls silent only when a collective has taken all its time, which is hours, because ranks
wait that long for rank 0 to collect rollouts; and gloo may miss that its connection was reset. So the first rank of
each node connects to the first rank of every other one, and lets the kernel probe these connections: a process that is
busy, or stopped in a debugger, is not taken for lost. A connection that ends without a goodbye means that its process
was killed or that someone between resets connections. Who connects must show a word that is in the ranks' store.
"""

import atexit
import contextlib
import hmac
import logging
import os
import secrets
import socket
import sys
import threading
import time
from multiprocessing.connection import wait
from typing import NoReturn

from torch._C._distributed_c10d import Store

from arealite.utils.network import address_toward

logger = logging.getLogger("arealite.hosts")

_LOOK_AGAIN_S = 0.2
_GOODBYE = b"."
_WORD_S = 10.0  # in which a connection must show the word
_MAX_STRANGERS = 64  # connections that have not; others wait
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
    address, port = listener.getsockname()
    word = secrets.token_hex(16)
    threading.Thread(target=_accept, args=(listener, word.encode(), num_hosts - 1), name="watch", daemon=True).start()
    atexit.register(say_goodbye)
    store.set(f"watch/{host}", f"{address}:{port} {word} {socket.gethostname()}")
    for other in range(num_hosts):
        if other != host:
            endpoint, word, name = store.get(f"watch/{other}").decode().split(" ", 2)
            arguments = endpoint, word, name, timeout_s
            threading.Thread(target=_watch, args=arguments, name=f"watch-{name}", daemon=True).start()


def say_goodbye() -> None:
    """Tell the other nodes that this process may end now."""
    while _links:
        with contextlib.suppress(OSError), _links.pop() as link:
            link.send(_GOODBYE)


def _accept(listener: socket.socket, word: bytes, num_peers: int) -> None:
    """Keep the connections that show the word, and close all others; close the port after the last peer."""
    strangers: dict[socket.socket, tuple[bytes, float]] = {}  # what each has said, and until when it may
    with listener:
        while num_peers:
            ready = wait([*strangers, *[listener] * (len(strangers) < _MAX_STRANGERS)], _LOOK_AGAIN_S)
            if listener in ready:
                try:
                    stranger, _ = listener.accept()
                    stranger.setblocking(False)
                    strangers[stranger] = b"", time.monotonic() + _WORD_S
                except OSError:  # it has gone again, or this process may open no more files
                    time.sleep(_LOOK_AGAIN_S)
            for stranger, (said, until) in list(strangers.items()):
                is_over = time.monotonic() > until
                if stranger in ready:
                    more = b""
                    with contextlib.suppress(OSError):
                        more = stranger.recv(len(word) - len(said))
                    said, is_over = said + more, is_over or not more
                    strangers[stranger] = said, until
                if hmac.compare_digest(said, word):
                    del strangers[stranger]
                    stranger.setblocking(True)
                    _links.append(stranger)
                    num_peers -= 1
                elif is_over or len(said) == len(word):  # not earlier: that would tell which part is right
                    del strangers[stranger]
                    stranger.close()
    for stranger in strangers:
        stranger.close()


def _watch(endpoint: str, word: str, name: str, timeout_s: float) -> None:
    """Watch one node until its process has said goodbye."""
    host, _, port = endpoint.rpartition(":")
    end = "closed"
    try:
        with _connect((host, int(port)), timeout_s) as link:
            link.sendall(word.encode())
            if link.recv(1) == _GOODBYE:
                return
    except (ConnectionResetError, ConnectionRefusedError):
        end = "reset"
    except OSError as error:
        _end(f"{name} ({host}) must answer within {timeout_s:g} s: got {error}")
    time.sleep(timeout_s)
    _end(f"the trainer on {name} ({host}) must not end before ours: its connection was {end}")


def _connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
    """Connect although there may be no route for a moment; the kernel ends the link with an error when its other end is
    silent for `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            link = socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.1))
            break
        except OSError as error:
            if isinstance(error, ConnectionError | TimeoutError) or time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_AGAIN_S)
    interval_s = max(1, int(timeout_s / 5))
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * max(timeout_s - interval_s, 1)))
    return link


def _end(text: str) -> NoReturn:
    """End this process although its main thread may be stuck in C code."""
    logger.critical("%s. Look after that node and the network, then start the run again.", text)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
