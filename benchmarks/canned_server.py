"""The server of `runtime_overhead.py` and `reply_burst.py`: answers every request with the same tokens.

    python benchmarks/canned_server.py TOKENS DELAY_S [PORT [SLOTS]]

It answers after a delay, give or take a third, and imports next to nothing. GET /count has the requests that it holds.
"""

import asyncio
import json
import os
import random
import sys

from aiohttp import web


def answer_of(num_tokens: int) -> tuple[list[int], list[float]]:
    """Return tokens and logprobs of the completion."""
    tokens = [17 * index % 400 + 5 for index in range(num_tokens)]
    return tokens, [-1.25 - index % 4096 / 977 for index in range(num_tokens)]


def main() -> None:
    """Answer every request with the same tokens until stdin closes."""
    num_tokens, delay_s, draw = int(sys.argv[1]), float(sys.argv[2]), random.Random(0)
    port, slots = [*map(int, sys.argv[3:]), *[0] * (5 - len(sys.argv))]
    tokens, logprobs = answer_of(num_tokens)
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, tokens)],
        "weight_version": "1000000000",  # never too old
    }
    answer = json.dumps({"output_ids": tokens, "text": "", "meta_info": meta}).encode()
    count = 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal count
        body = await request.read()
        assert body.startswith(b"{")
        count += 1
        try:
            if delay_s:
                await asyncio.sleep(draw.uniform(2 / 3, 4 / 3) * delay_s)
        finally:
            count -= 1
        return web.Response(body=answer, content_type="application/json")

    async def agree(_: web.Request) -> web.Response:
        return web.json_response({})

    async def describe(_: web.Request) -> web.Response:
        return web.json_response({"slots": slots} if slots else {})

    async def tell(_: web.Request) -> web.Response:
        return web.json_response({"count": count})

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/generate", generate), web.post("/continue_generation", agree)])
        app.add_routes([web.get("/get_server_info", describe), web.get("/count", tell)])
        app.add_routes([web.get(path, agree) for path in ("/health", "/get_model_info")])
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=8192).start()
        print(f"127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        os._exit(0)

    asyncio.run(run())


if __name__ == "__main__":
    main()
