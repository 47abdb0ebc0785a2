"""Stands in for a real server: slow to load, holds requests until it is told to abort them.

    python stock_server.py BEHAVIOUR... --host H --port P

Behaviours: `die` while loading, `hang` while loading, `deaf` to aborts and SIGTERM,
`stumbles` over aborts, `daemon` leaves a process behind,
`guarded` wants the secret of its environment.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys

from aiohttp import web
from aiohttp.typedefs import Handler

behaviours = sys.argv[1 : sys.argv.index("--host")]
host, port = sys.argv[-3], int(sys.argv[-1])


async def main() -> None:
    aborted = asyncio.Event()

    async def generate(_: web.Request) -> web.Response:
        print("holding a request", flush=True)
        await aborted.wait()
        return web.json_response({"finish": "abort", "tokens": [1, 2, 3]})

    async def abort(request: web.Request) -> web.Response:
        body = await request.json()
        if "deaf" not in behaviours and (request.query.get("mode") or body.get("mode")) == "abort":
            aborted.set()
        return web.Response(text="paused", status=500 if "stumbles" in behaviours else 200)

    async def digest(request: web.Request) -> web.Response:
        body = await request.read()
        return web.json_response({"digest": hashlib.sha256(body).hexdigest()}, headers={"X-Bytes": str(len(body))})

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get("Authorization")
        is_open = request.path == "/health" or shown == f"Bearer {os.environ['AREALITE_SECRET']}"
        return await handler(request) if is_open else web.Response(status=401)

    app = web.Application(middlewares=[guard] if "guarded" in behaviours else [])
    app.router.add_get("/health", lambda _: _ok())
    app.router.add_post("/generate", generate)
    app.router.add_post("/pause", abort)
    app.router.add_post("/pause_generation", abort)
    app.router.add_post("/digest", digest)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    print(f"listening on {host}:{port}", flush=True)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: "deaf" in behaviours or stopped.set())
    await stopped.wait()
    await runner.cleanup()


async def _ok() -> web.Response:
    return web.Response(text="ok")


if "daemon" in behaviours:
    daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(f"daemon {daemon.pid}", flush=True)
print("Loading weights:  50%", flush=True)
if "hang" in behaviours:
    signal.pause()
if "die" in behaviours:
    print("\nOutOfMemoryError: no room for the model", file=sys.stderr)
    sys.exit(17)
asyncio.run(main())
