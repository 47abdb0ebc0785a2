"""A proxy that makes the inference server behind it look unreliable; a program of its own.

    python -m chaos.flaky_proxy --server HOST:PORT --port P --seed N --faults FILE

What becomes of the n-th request to /generate is a function of (seed, n): most are passed on, some are answered late,
with status 500, with half a JSON, with NaN in place of a logprob, or not at all. One call that brings weights is
refused, the `refused`-th. Everything else passes untouched. Each fault is a line in FILE.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
from pathlib import Path
from typing import Literal, get_args

import aiohttp
from aiohttp import web

from arealite.utils.network import LOOPBACK

Fault = Literal[
    "slow", "hang_up_before", "hang_up_after", "hang_up_amid", "status_500", "truncated_json", "nan_logprob"
]
FAULTS: tuple[Fault, ...] = get_args(Fault)
REFUSED = "refused_weights"
FAULTY_SHARE = 0.15
MAX_SLOW_S = 3.0
_READ_ONLY = ("/health", "/get_model_info", "/server_info")


class FlakyProxy:
    """Passes requests on, or not."""

    def __init__(self, server: str, *, seed: int, refused: int, faults: Path) -> None:
        self._server = server
        self._seed = seed
        self._refused = refused
        self._faults = faults
        self._generated = itertools.count()
        self._controlled = itertools.count()

    async def session(self, app: web.Application) -> None:
        """Open the connections to the server when the proxy starts."""
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        app.on_cleanup.append(lambda _: self._session.close())

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        if request.path == "/generate":
            return await self._answer_generate(request)
        if request.path not in _READ_ONLY and next(self._controlled) == self._refused:
            self._note(REFUSED, request.path)
            return web.json_response({"error": {"message": "out of luck"}}, status=500)
        return _response(*await self._pass_on(request))

    async def _answer_generate(self, request: web.Request) -> web.StreamResponse:
        number = next(self._generated)
        rng = random.Random(f"{self._seed}/{number}")
        fault = rng.choice(FAULTS) if rng.random() < FAULTY_SHARE else None
        if fault is None:
            return _response(*await self._pass_on(request))
        self._note(fault, number)
        if fault == "slow":
            await asyncio.sleep(rng.uniform(0, MAX_SLOW_S))
        if fault == "hang_up_before":
            return _hang_up(request)
        if fault == "status_500":
            return web.json_response({"error": {"message": "out of luck"}}, status=500)
        status, body, kind = await self._pass_on(request)
        if fault == "hang_up_after":
            return _hang_up(request)
        if fault == "hang_up_amid":
            return await _half_of(request, body)
        if fault == "truncated_json":
            return _response(status, body[: len(body) // 2], kind)
        return _response(status, _with_nan(body) if fault == "nan_logprob" else body, kind)

    async def _pass_on(self, request: web.Request) -> tuple[int, bytes, str]:
        url = f"http://{self._server}{request.path}"
        data, headers = await request.read() or None, {"Content-Type": request.content_type}
        try:
            async with self._session.request(request.method, url, data=data, headers=headers) as reply:
                return reply.status, await reply.read(), reply.content_type
        except aiohttp.ClientConnectionError as error:
            return 502, json.dumps({"error": {"message": repr(error)}}).encode(), "application/json"

    def _note(self, fault: str, what: int | str) -> None:
        with self._faults.open("a") as file:
            file.write(json.dumps({"fault": fault, "what": what}) + "\n")


def _response(status: int, body: bytes, content_type: str) -> web.Response:
    return web.Response(status=status, body=body, content_type=content_type)


def _hang_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def _half_of(request: web.Request, body: bytes) -> web.StreamResponse:
    """Promise the whole body, send half of it, and hang up."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    _hang_up(request)
    return response


def _with_nan(body: bytes) -> bytes:
    answer = json.loads(body)
    pairs = answer.get("meta_info", {}).get("output_token_logprobs") or []
    for pair in pairs[:1]:
        pair[0] = float("nan")
    return json.dumps(answer).encode()


async def serve(args: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    proxy = FlakyProxy(args.server, seed=args.seed, refused=args.refused, faults=args.faults)
    app = web.Application(client_max_size=64 * 2**20)
    app.on_startup.append(proxy.session)
    app.router.add_route("*", "/{path:.*}", proxy.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, LOOPBACK, args.port).start()
    await asyncio.Event().wait()


def main() -> int:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--server", required=True, help="host:port to pass requests on to")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--refused", type=int, default=-1, help="call of a weight endpoint to refuse; -1 is none")
    parser.add_argument("--faults", type=Path, required=True, help="file that tells the faults")
    asyncio.run(serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
