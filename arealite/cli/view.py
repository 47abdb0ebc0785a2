"""`arealite view`: serves the page about runs on loopback until Ctrl-C or SIGTERM."""

import argparse
import asyncio
import secrets
import signal
from pathlib import Path

from arealite.api.errors import ConfigError
from arealite.utils.http_server import HttpServer
from arealite.utils.network import LOOPBACK
from arealite.viewer.app import Viewer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve a page about the runs at or below a folder on 127.0.0.1 until Ctrl-C, and print its address with a "
        "token, without which nobody else on this node can read it. Nothing of a run is changed."
    )
    parser.epilog = "From elsewhere: ssh -L PORT:127.0.0.1:PORT NODE, then open the address that was printed."
    parser.add_argument("folder", help="<fileroot>/<experiment>/<trial>, or up to three folders above")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")


def run(args: argparse.Namespace) -> int:
    """Serve the runs at or below a folder."""
    token = secrets.token_urlsafe(24)
    asyncio.run(_serve(Viewer(Path(args.folder), token), token, args.port))
    return 0


async def _serve(viewer: Viewer, token: str, port: int) -> None:
    should_end = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, should_end.set)
    server = HttpServer(viewer.app, token)
    try:
        try:
            listening = await server.start(LOOPBACK, port)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port must be a free port: got {port} ({error}). Leave it out for any.") from error
        print(f"http://{LOOPBACK}:{listening}/#token={token}\nCtrl-C ends it; nothing of a run is changed.", flush=True)
        await should_end.wait()
    finally:
        await server.close()
