"""Runs one inference server: starts it, tells its run when it is ready, hands its work back at the end.

    python -m arealite.launcher.serve --backend lite --name server-0 --host ADDRESS [--join EXPERIMENT/TRIAL
        --name-resolve TYPE --registry WHERE] -- COMMAND OF THE SERVER, WITHOUT --host AND --port

Trainers know its `ServerRecord`, kept under a lease as long as this program lives. SIGTERM hands back what runs: the
record says `leaving`, trainers send nothing more, requests in flight are answered with the tokens so far, the server
ends. A second signal, or ten seconds, end it at once. A server that can't check the secret, and is to be reached from
other machines, listens on loopback behind an `AuthProxy`.

Exit status: 0 after SIGTERM or SIGINT; 2 refused, and nothing was started; 3 not ready in time; else that of the
server, and 1 if that is 0. Invariant: the server does not outlive this program, however that ends, and no record says
`ready` before the server has answered at its address.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence

import aiohttp
import psutil

from arealite.api.errors import ConfigError
from arealite.inference.backends import KINDS
from arealite.launcher.place.base import Job
from arealite.launcher.place.local import JobRun
from arealite.launcher.serve.auth_proxy import AuthProxy
from arealite.launcher.serve.registration import Registration
from arealite.utils.environment import SECRET_VARIABLE
from arealite.utils.name_resolve import NameResolveError, make_repository
from arealite.utils.network import LOOPBACK, hold_port, port_of
from arealite.utils.processes import adopt_orphans, descendants, describe_exit, kill_tree
from arealite.utils.secret import check_exposed, is_loopback, secret_of_environment
from arealite.utils.server_record import ServerRecord, servers_root

REFUSED = 2
NOT_READY = 3
_NOTICE_S = 1.5
"""Trainers look once a second who is there."""
_DRAIN_S = 10.0
_LOOK_S = 0.1
_ANSWER_S = 5.0
_SHOWN_CHARS = 200
_REMEMBERED_BYTES = 4096
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x1f]")
_WHERE = {"nfs": "nfs_record_root", "redis": "redis_addr", "etcd3": "etcd3_addr", "ray": "ray_actor_name"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m arealite.launcher.serve", description="Run one inference server.")
    parser.add_argument("--backend", choices=KINDS, required=True, help="what the command starts")
    parser.add_argument("--name", required=True, help="of the server in its run")
    parser.add_argument("--host", default=LOOPBACK, help="address by which trainers reach this machine")
    parser.add_argument("--port", type=int, default=0, help="0 is any free one")
    parser.add_argument("--node", default=platform.node(), help="name of this machine, for messages")
    parser.add_argument("--setup-timeout", type=float, default=600.0, help="seconds in which it must become ready")
    parser.add_argument("--join", metavar="EXPERIMENT/TRIAL", help="the run to register for; without it, none")
    parser.add_argument("--name-resolve", choices=_WHERE, default="nfs", help="where the run registers servers")
    parser.add_argument("--registry", default="", help="its folder, address or actor")
    parser.add_argument("command", nargs="+", help="starts the server; --host and --port are added")
    args = parser.parse_args(argv)
    adopt_orphans()
    try:
        return asyncio.run(_run(args))
    except (ConfigError, NameResolveError) as error:
        print(f"{ConfigError.__module__}.ConfigError: {error}", file=sys.stderr)
        return REFUSED


class Server:
    """The real server, whose output goes to our stdout."""

    def __init__(self, args: argparse.Namespace, address: str) -> None:
        """Start it."""
        host, _, port = address.rpartition(":")
        command = [*args.command, "--host", host, "--port", port]
        # Other servers could do nothing with the secret but show it.
        hidden = {} if KINDS[args.backend].is_embedded else {SECRET_VARIABLE: ""}
        self.address = address
        """Where it listens."""
        self._last = b""
        self._run = JobRun()
        self.ended = asyncio.create_task(self._end(Job(args.name, command, hidden)))
        """Resolves to its exit status."""

    def output(self, data: bytes) -> None:
        """Pass on what it writes."""
        self._last = (self._last + data)[-_REMEMBERED_BYTES:]
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def last_line(self) -> str:
        """Return the last line it wrote, as far as it is worth showing."""
        line = re.split(r"[\r\n]+", self._last.decode(errors="replace").strip())[-1]
        return _CONTROL.sub("", line)[:_SHOWN_CHARS] or "starting"

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self._run.terminate()

    async def kill(self) -> None:
        """End it with everything it started."""
        self._run.kill()
        await self.ended

    async def _end(self, job: Job) -> int:
        status = await self._run.run(job, self.output)
        for pid in descendants(os.getpid()):  # if its guard was killed: what that watched over is ours now
            kill_tree(pid)
        return status


async def _run(args: argparse.Namespace) -> int:
    """Start everything, watch it to its end, and leave nothing."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    secret = secret_of_environment()
    with _hold(args, secret) as holder, hold_port() as inner_holder:
        address = f"{args.host}:{port_of(holder)}"
        registration = _registration(args, address, secret)
        await registration.publish()
        proxy, inner = None, address
        if not KINDS[args.backend].is_embedded and secret and not is_loopback(args.host):
            inner = f"{LOOPBACK}:{port_of(inner_holder)}"
            proxy = AuthProxy(inner, secret=secret)
            await proxy.start(args.host, port_of(holder))
        server = Server(args, inner)
        telling = asyncio.create_task(registration.keep_saying(server.last_line))
        try:
            status = await _watch(server, registration, signals, args, address)
            if status == 0:
                await _hand_back(server, registration, signals, args)
            return status
        finally:
            telling.cancel()
            await server.kill()
            await registration.withdraw()
            if proxy is not None:
                await proxy.close()


def _hold(args: argparse.Namespace, secret: str | None) -> socket.socket:
    """Reserve the address until the server listens there."""
    try:
        check_exposed(args.host, secret)
        return hold_port(args.host, args.port)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(
            f"--host and --port must be a free address of this machine: got {args.host}:{args.port}, "
            f"{error.strerror}. Correct --host, or leave --port out."
        ) from error


def _registration(args: argparse.Namespace, address: str, secret: str | None) -> Registration:
    """Describe the server to its run, if it has one."""
    record = ServerRecord(address, args.backend, args.node, os.getpid(), "loading", "starting", time.time())
    if args.join is None:
        return Registration(None, "", record, "")
    experiment, _, trial = args.join.partition("/")
    if not (experiment and trial):
        raise ConfigError(f"--join must be EXPERIMENT/TRIAL: got {args.join}. Write the two names of the run.")
    if secret is None:
        raise ConfigError(
            f"{SECRET_VARIABLE} must be the secret of {args.join}: got nothing. It is in .secret of the run's folder."
        )
    if args.host == "0.0.0.0":
        raise ConfigError("--host must be one address, which trainers can be told: got 0.0.0.0. Name an interface's.")
    names = make_repository(args.name_resolve, **{_WHERE[args.name_resolve]: args.registry})
    return Registration(names, f"{servers_root(experiment, trial)}/{args.name}", record, secret)


async def _watch(
    server: Server, registration: Registration, signals: asyncio.Queue[int], args: argparse.Namespace, address: str
) -> int:
    """Return 0 at the first signal, or else why the server is of no use any more."""
    started, signalled = time.monotonic(), asyncio.create_task(signals.get())
    loading = asyncio.create_task(_healthy(address))
    await asyncio.wait(
        [loading, signalled, server.ended], timeout=args.setup_timeout, return_when=asyncio.FIRST_COMPLETED
    )
    is_ready = loading.done() and loading.exception() is None
    loading.cancel()
    if is_ready:
        print(f"serve: {args.name} is ready at {address} after {time.monotonic() - started:.1f} s", flush=True)
        await registration.say("ready")
        await asyncio.wait([signalled, server.ended], return_when=asyncio.FIRST_COMPLETED)
    if signalled.done():
        return 0
    signalled.cancel()
    if not server.ended.done():
        last = server.last_line()
        print(f"serve: {args.name} was not ready within {args.setup_timeout:g} s; it last wrote: {last}", flush=True)
        return NOT_READY
    status = server.ended.result()
    when = "" if is_ready else " while it was loading"
    print(f"serve: {args.name} ended with {describe_exit(status)}{when}", flush=True)
    return status or 1


async def _healthy(address: str) -> None:
    """Wait until the server answers GET /health."""
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"http://{address}/health", headers={"Connection": "close"}) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(_LOOK_S)


async def _hand_back(
    server: Server, registration: Registration, signals: asyncio.Queue[int], args: argparse.Namespace
) -> None:
    """Let clients have the tokens so far, unless a second signal comes or the time is up."""

    async def leave() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(registration.say("leaving"), _NOTICE_S)  # a registry that hangs must not cost tokens
        if not num_connected(server.address):
            return
        await asyncio.sleep(_NOTICE_S)
        if (abort := KINDS[args.backend].abort_call) is not None:
            await _post(server.address, *abort)
        server.terminate()
        while num_connected(server.address) and not server.ended.done():
            await asyncio.sleep(_LOOK_S)

    leaving, again = asyncio.create_task(leave()), asyncio.create_task(signals.get())
    await asyncio.wait([leaving, again], timeout=_DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if leaving.done():
        leaving.result()
    leaving.cancel()


async def _post(address: str, endpoint: str, body: Mapping[str, str]) -> None:
    """Ask a server for something that it may fail to do."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as session,
            session.post(f"http://{address}{endpoint}", json=body) as answer,
        ):
            answer.raise_for_status()
    except (aiohttp.ClientError, TimeoutError) as error:
        print(f"serve: WARNING: {endpoint} failed, requests in flight may be lost: {error!r}", flush=True)


def num_connected(address: str) -> int:
    """Count who is connected to a server of this machine; nobody else can have a request in flight."""
    port = int(address.rpartition(":")[2])
    connections = psutil.net_connections("tcp")
    return sum(one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED for one in connections if one.laddr)


if __name__ == "__main__":
    sys.exit(main())
