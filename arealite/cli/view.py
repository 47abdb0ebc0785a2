"""`arealite view`: a page about runs, on loopback, until Ctrl-C or SIGTERM."""

import asyncio
import secrets
import signal
from pathlib import Path

from arealite.api.errors import ConfigError
from arealite.utils.http_server import HttpServer
from arealite.utils.network import LOOPBACK
from arealite.viewer.app import Viewer


def view(folder: str, *, port: int) -> int:
    """Serve the runs at or below a folder."""
    token = secrets.token_urlsafe(24)
    asyncio.run(_serve(Viewer(Path(folder), token), token, port))
    return 0


async def _serve(viewer: Viewer, token: str, port: int) -> None:
    is_over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, is_over.set)
    server = HttpServer(viewer.app, token)
    try:
        try:
            listening = await server.start(LOOPBACK, port)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--port must be a free port: got {port} ({error}). Leave it out for any.") from error
        print(f"http://{LOOPBACK}:{listening}/#token={token}\nCtrl-C ends it; nothing of a run is changed.", flush=True)
        await is_over.wait()
    finally:
        await server.close()
