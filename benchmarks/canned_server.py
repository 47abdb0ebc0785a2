"""The server of `runtime_overhead.py`: answers every request with the same tokens. It imports next to nothing."""

import asyncio
import json
import os
import random
import sys

from aiohttp import web


def main() -> None:
    """Answer every request with the same tokens until stdin closes."""
    num_tokens, delay_s, draw = int(sys.argv[1]), float(sys.argv[2]), random.Random(0)
    tokens = [17 * index % 400 + 5 for index in range(num_tokens)]
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-1.25 - index / 977, token, None] for index, token in enumerate(tokens)],
        "weight_version": "1000000000",  # never too old
    }
    answer = json.dumps({"output_ids": tokens, "text": "", "meta_info": meta}).encode()

    async def generate(request: web.Request) -> web.Response:
        body = await request.read()
        assert body.startswith(b"{")
        if delay_s:
            await asyncio.sleep(draw.uniform(2 / 3, 4 / 3) * delay_s)
        return web.Response(body=answer, content_type="application/json")

    async def agree(_: web.Request) -> web.Response:
        return web.json_response({})

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/generate", generate), web.post("/continue_generation", agree)])
        app.add_routes([web.get(path, agree) for path in ("/health", "/get_model_info", "/get_server_info")])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=8192).start()
        print(f"127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        os._exit(0)

    asyncio.run(run())


if __name__ == "__main__":
    main()
