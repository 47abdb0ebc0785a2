"""Runs one inference server: starts it, registers it for its run, hands its work back at the end.

    python -m arealite.launcher.serve --backend lite --name server-0 --host ADDRESS [--registry WHERE]
        -- COMMAND OF THE SERVER, WITHOUT --host AND --port

SIGTERM hands back what runs: the server's entry is removed, trainers send nothing more, requests in flight are answered
with the tokens so far, the server ends. A second signal, or ten seconds, end it at once.

Exit status: 0 after a signal; 2 refused; else that of the server, and 1 if that is 0. Invariant: the server does not
outlive this program, and has no entry before it has answered at its address and, if other nodes reach it, has refused a
request without the secret.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any

import aiohttp

from arealite.api.errors import REFUSED, ConfigError
from arealite.api.script import show_refusal
from arealite.api.servers import KINDS
from arealite.inference.registry import RegistryClient, ServerEntry
from arealite.launcher.place.base import Job
from arealite.launcher.place.local import JobRun
from arealite.launcher.serve.registration import Registration
from arealite.utils import processes
from arealite.utils.network import LOOPBACK, hold_port, port_of
from arealite.utils.secret import SECRET_VARIABLE, authorization, check_exposed, is_loopback, secret_of_environment
from arealite.utils.terminal import Parser

_NOTICE_S = 1.5  # what trainers get to learn that the server leaves, before its requests are aborted
_DRAIN_S = 10.0
_LOOK_S = 0.1
_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = Parser(prog="python -m arealite.launcher.serve", description="Run one inference server.")
    parser.add_argument("--backend", choices=KINDS, required=True, help="what the command starts")
    parser.add_argument("--name", required=True, help="name of the server in its run")
    parser.add_argument("--host", default=LOOPBACK, help="address by which trainers reach this node")
    parser.add_argument("--port", type=int, default=0, help="0 is any free one")
    parser.add_argument(
        "--registry",
        default=os.environ.get(processes.REGISTRY_VARIABLE, ""),
        help=f"host:port of the registry or its registry.json (default: {processes.REGISTRY_VARIABLE}), empty: none",
    )
    parser.add_argument("command", nargs="+", help="starts the server; --host and --port are added")
    args = parser.parse_args(argv)
    processes.adopt_orphans()
    try:
        return asyncio.run(_run(args))
    except ConfigError as error:
        show_refusal(error, name=f"{ConfigError.__module__}.ConfigError")
        return REFUSED


class Server:
    """A server from its start to its end; its output goes to our stdout."""

    def __init__(self, args: argparse.Namespace, address: str, registration: Registration) -> None:
        self._args = args
        self._address = address
        self._registration = registration
        self._secret = secret_of_environment()
        self._run = JobRun()
        self._signalled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take_signal(self) -> None:
        """Hand the server back at the first signal, and kill it at the second."""
        if self._signalled.done():
            self._run.kill()
        else:
            self._signalled.set_result(None)

    async def run(self) -> int:
        """Start it, watch it to its end, and leave nothing behind."""
        self._ended = asyncio.create_task(self._end())  # resolves to its exit status
        try:
            return await self._watch()
        finally:
            self._run.kill()
            await self._ended
            await self._registration.withdraw()

    async def _watch(self) -> int:
        """Return 0 after a signal, else the exit status that explains why the server is unusable."""
        name, started = self._args.name, time.monotonic()
        is_exposed = self._secret is not None and not is_loopback(self._args.host)
        loading = asyncio.create_task(_loaded(self._address, is_exposed=is_exposed))
        ends: list[asyncio.Future[Any]] = [self._signalled, self._ended]
        await asyncio.wait([loading, *ends], return_when=asyncio.FIRST_COMPLETED)
        if is_ready := loading.done():
            loading.result()
            print(f"serve: {name} is ready at {self._address} after {time.monotonic() - started:.1f} s", flush=True)
            self._registration.keep()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        loading.cancel()
        if self._signalled.done():
            if is_ready:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._hand_back(), _DRAIN_S)
            return 0
        status = self._ended.result()
        when = "" if is_ready else " while it was loading"
        print(f"serve: {name} ended with {processes.describe_exit(status)}{when}", flush=True)
        return status or 1

    async def _hand_back(self) -> None:
        """Give clients the tokens so far, and let the server end."""
        await self._registration.withdraw()
        await asyncio.sleep(_NOTICE_S)
        if (abort := KINDS[self._args.backend].abort_call) is not None:
            endpoint, body = abort
            url, headers = f"http://{self._address}{endpoint}", authorization(self._secret)
            try:
                async with aiohttp.request("POST", url, json=body, headers=headers, timeout=_TIMEOUT) as answer:
                    answer.raise_for_status()
            except (aiohttp.ClientError, TimeoutError) as error:
                what = f"{type(error).__name__}: {error}"  # its repr shows the secret
                print(f"serve: WARNING: {endpoint} failed, requests in flight may be lost: {what}", flush=True)
        self._run.terminate()
        await asyncio.shield(self._ended)

    async def _end(self) -> int:
        host, _, port = self._address.rpartition(":")
        job = Job(self._args.name, [*self._args.command, "--host", host, "--port", port], {})
        status = await self._run.run(job, _pass_on)
        for pid in processes.descendants(os.getpid()):  # if its guard was killed, we have adopted what it watched over
            processes.kill_tree(pid)
        return status


def _pass_on(output: bytes) -> None:
    sys.stdout.buffer.write(output)
    sys.stdout.buffer.flush()


async def _run(args: argparse.Namespace) -> int:
    """Reserve an address and run the server there."""
    with _hold(args) as holder:
        address = f"{args.host}:{port_of(holder)}"
        server = Server(args, address, _registration(args, address))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.take_signal)
        return await server.run()


def _hold(args: argparse.Namespace) -> socket.socket:
    """Reserve the address until the server listens there."""
    try:
        check_exposed(args.host, secret_of_environment())
        return hold_port(args.host, args.port)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(
            f"--host and --port must be a free address of this node: got {args.host}:{args.port}, "
            f"{error.strerror}. Correct --host, or leave --port out."
        ) from error


def _registration(args: argparse.Namespace, address: str) -> Registration:
    """Describe the server to its run, if it has one."""
    entry = ServerEntry(args.name, address, args.backend, incarnation=uuid.uuid4().hex)
    if not args.registry:
        return Registration(None, entry)
    if (secret := secret_of_environment()) is None:
        raise ConfigError(
            f"{SECRET_VARIABLE} must be the secret of the run: got nothing. It is in .secret of its folder."
        )
    if args.host == "0.0.0.0":
        raise ConfigError("--host must be one address, which trainers connect to: got 0.0.0.0. Name an interface's.")
    return Registration(RegistryClient(args.registry, secret), entry)


async def _loaded(address: str, *, is_exposed: bool) -> None:
    """Wait until the server answers GET /health, and refuse one that lets other nodes in without the secret."""
    while await _get(address, "/health") != 200:
        await asyncio.sleep(_LOOK_S)
    if not is_exposed:
        return
    while (status := await _get(address, "/needs-the-secret")) is None:  # unknown to servers, so that nothing happens
        await asyncio.sleep(_LOOK_S)
    if status != 401:
        raise ConfigError(
            f"a server that other nodes reach must refuse requests without the secret: got status {status} from "
            f"{address}. Start it by our wrapper (python -m arealite.launcher.serve.sglang_server or vllm_server)."
        )


async def _get(address: str, path: str) -> int | None:
    """Return the status of a request without the secret; None without an answer."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with aiohttp.request("GET", f"http://{address}{path}", timeout=_TIMEOUT) as answer:
            return answer.status
    return None
