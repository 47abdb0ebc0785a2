"""The parent's side of one worker process: start it, exchange messages with it, watch its memory, end it.

Invariant: every exchange ends by its deadline, whatever the process does: it may hang in C code, be stopped, die, or
take all memory. After `timeout` or `crash` the process must be killed. Used by one thread, except `kill`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import psutil

from arealite.reward.worker import Reply
from arealite.utils.processes import describe_exit, exit_status, kill_tree

STARTUP_TIMEOUT_S = 60.0
_CHECK_S = 0.1  # interval of checks on a running call
_END_S = 10.0  # deadline for the end of a process that was killed or closed its socket
_GIB = 2**30
_BOOTSTRAP = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from arealite.reward.worker import main"


class WorkerProcess:
    """One process, which imports the function at once, in the background."""

    def __init__(self, start_message: bytes, max_growth_gib: float) -> None:
        self._socket, theirs = socket.socketpair()
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._max_growth_gib = max_growth_gib
        self._first_gib = 0.0
        with theirs:
            arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{_BOOTSTRAP}; main()", *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._psutil = psutil.Process(self.process.pid)
        self._ready_by = time.monotonic() + STARTUP_TIMEOUT_S
        with contextlib.suppress(OSError):  # `wait_ready` reports it
            self._send(start_message, self._ready_by)

    def wait_ready(self) -> Reply:
        """Wait until the function is imported."""
        kind, value = self._receive(self._ready_by)
        self._first_gib = self._memory_gib()
        if kind == "timeout":
            return "crash", f"no worker that was ready within {STARTUP_TIMEOUT_S:g} s: its module imports slowly"
        return kind, value

    def call(self, call: dict[str, Any], timeout: float) -> Reply:
        """Run the function."""
        deadline = time.monotonic() + timeout
        try:
            message = pickle.dumps(call)
        except Exception:
            return "exception", traceback.format_exc()
        try:
            self._send(message, deadline)
        except BlockingIOError:
            return "timeout", None
        except OSError:
            return "crash", self._end()
        return self._receive(deadline)

    @property
    def growth_gib(self) -> float:
        """Memory that it took since it was ready."""
        return self._memory_gib() - self._first_gib

    @property
    def is_too_big(self) -> bool:
        """Whether it should be replaced."""
        return self.growth_gib > self._max_growth_gib

    def kill(self) -> None:
        """End the process at once, with what the reward function may have started."""
        if self.process.poll() is None:
            kill_tree(self.process.pid)
        self.process.wait(_END_S)

    def close(self) -> None:
        """Kill the process and close the socket."""
        self.kill()
        self._connection.close()
        self._socket.close()

    def _send(self, message: bytes, deadline: float) -> None:
        """Send a message; raise BlockingIOError if the process does not read it by the deadline."""
        left_s = max(0.001, deadline - time.monotonic())
        timeval = struct.pack("@ll", int(left_s), int(left_s % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        self._connection.send_bytes(message)

    def _receive(self, deadline: float) -> Reply:
        try:
            while not self._connection.poll(max(0.0, min(_CHECK_S, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    return "timeout", None
                if self.process.poll() is not None:  # what it has started may keep the socket open
                    return "crash", self._end()
                if self._first_gib and self.is_too_big:
                    return "crash", f"{self.growth_gib:.1f} GiB taken in one call, more than {self._max_growth_gib:g}"
            reply: Reply = self._connection.recv()  # short, and sent in one piece
        except (EOFError, OSError):
            return "crash", self._end()
        return reply

    def _end(self) -> str:
        """Describe how the process ended."""
        try:
            return describe_exit(exit_status(self.process.wait(_END_S)))
        except subprocess.TimeoutExpired:
            return "a socket that was closed"

    def _memory_gib(self) -> float:
        """Return the resident memory; 0 when the process has ended."""
        try:
            return self._psutil.memory_info().rss / _GIB
        except psutil.NoSuchProcess:
            return 0.0
