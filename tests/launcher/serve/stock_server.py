"""Stands in for a real server that knows no secret: slow to load, holds requests until it is told to abort them.

    python stock_server.py BEHAVIOUR... --host H --port P

Behaviours: `die` while loading, `hang` while loading, `deaf` to aborts and SIGTERM, `daemon` leaves a process behind.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
import subprocess
import sys

from aiohttp import web

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
        return web.Response(text="paused")

    async def digest(request: web.Request) -> web.Response:
        body = await request.read()
        return web.json_response({"digest": hashlib.sha256(body).hexdigest()}, headers={"X-Bytes": str(len(body))})

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=203, headers={"X-Seen": request.headers.get("Authorization", "nothing")})
        await response.prepare(request)
        for index in range(3):
            await response.write(b"%d" % index * 1000)
            if request.query.get("break") and index == 1:
                assert request.transport is not None
                request.transport.abort()
            await asyncio.sleep(0.05)
        return response

    app = web.Application(client_max_size=2**30)
    app.router.add_get("/health", lambda _: _ok())
    app.router.add_post("/generate", generate)
    app.router.add_post("/pause", abort)
    app.router.add_post("/pause_generation", abort)
    app.router.add_post("/digest", digest)
    app.router.add_get("/stream", stream)
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
print("\x1b[32mLoading\x1b[0m weights:  50%\r", end="", flush=True)
if "hang" in behaviours:
    signal.pause()
if "die" in behaviours:
    print("\nOutOfMemoryError: no room for the model", file=sys.stderr)
    sys.exit(17)
asyncio.run(main())
