"""A small real server with SGLang's protocol whose tokens are a function of (seed, position): exactness can be checked.

It can be slow, fail, hang up, abort and swap versions mid-generation. It runs in a thread of its own; several may run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from arealite.api.io_struct import ParamSpec
from arealite.utils.weight_transfer import BroadcastGroup, close_group, join_group, receive_buckets

VOCABULARY = 1000
EOS = 1


def token_at(seed: int, position: int, *, eos_every: int = 0) -> int:
    """Return the token that any server samples at an absolute position for a sampling seed."""
    digest = int.from_bytes(hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=4).digest(), "big")
    if eos_every and digest % eos_every == 0:
        return EOS
    return 2 + digest % (VOCABULARY - 2)


def logprob_at(token: int, position: int, version: int) -> float:
    """Return the logprob that a server of that version reports."""
    return -(token + 1) / VOCABULARY - position / 1e4 - version


def kept_at(token: int, position: int) -> list[int]:
    """Return the ids that a server says it sampled this token from."""
    return [token, *range(VOCABULARY, VOCABULARY + position % 4)]


@dataclass
class ScriptedServer:
    """The endpoints, and knobs that tests turn while it runs."""

    token_delay_s: float = 0.0
    holds_at: int | None = None
    """Position at which generation waits until this grows or is None; an abort ends the wait too."""
    eos_every: int = 0
    """A token is EOS with this inverse probability; 0 is never."""
    context: int = 4096
    version: int = 0
    tells: Literal["spans", "single", "nothing"] = "spans"
    returns_kept: bool = True
    """Whether it knows what `return_sampling_mask` means."""
    has_sessions: bool = True
    failures: list[int | str] = field(default_factory=list)
    """What the next calls of /generate answer: a status, `hang up`, `truncated`, `nan`, or `slow` (1 s late)."""
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Endpoint -> status and message that it always answers."""
    raw: dict[str, bytes] = field(default_factory=dict)
    """Endpoint -> bytes that it always writes instead of an answer, before it hangs up."""
    is_healthy: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Payloads of /generate."""
    tp_size: int = 1
    """Ranks that it has in a broadcast group."""
    joins: list[dict[str, Any]] = field(default_factory=list)
    """Payloads of /init_weights_update_group."""
    calls: list[str] = field(default_factory=list)
    """Other endpoints, in order."""
    updates: list[dict[str, Any]] = field(default_factory=list)
    """Payloads of the endpoints that bring weights."""
    weights: dict[str, Any] = field(default_factory=dict)
    is_paused: bool = False
    asleep: set[str] = field(default_factory=set)
    """Parts of its memory that it has given back."""
    deaths: list[str] = field(default_factory=list)
    """What was asked of it that would have ended the real one."""
    info: dict[str, Any] = field(default_factory=dict)
    """What it says of itself."""
    address: str = ""

    def __post_init__(self) -> None:
        self._groups: dict[str, list[BroadcastGroup]] = {}
        self._staged: dict[str, Any] | None = None
        self._staged_version = 0
        self._aborts = 0
        self._reached: list[tuple[int, int]] = []

    def app(self) -> web.Application:
        self._resumed = asyncio.Event()
        self._resumed.set()
        app = web.Application(middlewares=[self._refuse])
        app.router.add_get("/health", self._health)
        app.router.add_get("/get_model_info", self._model_info)
        app.router.add_get("/get_server_info", self._model_info)
        app.router.add_post("/generate", self._generate)
        for endpoint, handle in (
            ("/pause_generation", self._pause),
            ("/continue_generation", self._continue),
            ("/update_weights_from_disk", self._from_disk),
            ("/flush_cache", self._flush),
            ("/release_memory_occupation", self._release),
            ("/resume_memory_occupation", self._take_back),
            ("/init_weights_update_group", self._join),
            ("/destroy_weights_update_group", self._leave),
            ("/update_weights_from_distributed", self._stage),
            *((("/begin_weight_update", self._begin), ("/end_weight_update", self._end)) if self.has_sessions else ()),
        ):
            app.router.add_post(endpoint, handle)
        return app

    def abort_all(self) -> None:
        """Abort what runs, as an operator might."""
        self._aborts += 1

    @web.middleware
    async def _refuse(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.method == "POST" and request.path != "/generate":
            self.calls.append(request.path)
        if request.path in self.raw:
            assert isinstance(request.transport, asyncio.Transport)
            request.transport.write(self.raw[request.path])
            request.transport.close()
            return web.Response()  # goes nowhere: the handler's answer on a closed connection would be a traceback
        if request.path in self.refusals:
            status, message = self.refusals[request.path]
            return web.json_response({"success": False, "message": message}, status=status)
        response: web.StreamResponse = await handler(request)
        return response

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({}, status=200 if self.is_healthy else 503)

    async def _model_info(self, _: web.Request) -> web.Response:
        about = {"model_path": "scripted", "dtype": "auto", "enable_deterministic_inference": True}
        return web.json_response(about | self.info)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        if self.failures:
            failure = self.failures.pop(0)
            if failure == "hang up":
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            if failure == "slow":
                await asyncio.sleep(1)
            elif isinstance(failure, str):
                return await self._answer_badly(failure, body)
            else:
                return web.json_response({"error": {"message": "scripted"}}, status=failure)
        await self._resumed.wait()
        self._needs("weights", "kv_cache")
        if len(body["input_ids"]) >= self.context:
            message = f"The input ({len(body['input_ids'])} tokens) is longer than the model's context length"
            return web.json_response({"error": {"message": f"{message} ({self.context} tokens)."}}, status=400)
        return web.json_response(await self._sample(body))

    async def _answer_badly(self, how: str, body: dict[str, Any]) -> web.Response:
        reply = await self._sample(body)
        reply["meta_info"]["output_token_logprobs"][-1][0] = math.nan
        text = json.dumps(reply)
        return web.Response(
            text=text[: len(text) // 2] if how == "truncated" else text, content_type="application/json"
        )

    async def _sample(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, params = body["input_ids"], body["sampling_params"]
        seed, aborts = params.get("sampling_seed", 0), self._aborts
        tokens: list[int] = []
        pairs: list[list[Any]] = []
        spans: list[dict[str, Any]] = []
        finish: dict[str, Any] = {"type": "length"}
        first_version = self.version
        while len(tokens) < params["max_new_tokens"] and len(prompt) + len(tokens) < self.context:
            if self.token_delay_s:
                await asyncio.sleep(self.token_delay_s)
            position = len(prompt) + len(tokens)
            await self._hold(position, aborts)
            if self._aborts != aborts:
                finish = {"type": "abort", "message": "Aborted"}
                break
            token = token_at(seed, position, eos_every=self.eos_every)
            version = self.version if self.tells == "spans" else first_version
            pairs.append([logprob_at(token, position, version), token, None])
            if not spans or spans[-1]["version"] != str(version):
                spans.append({"version": str(version), "start": len(tokens), "end": len(tokens)})
            tokens.append(token)
            spans[-1]["end"] = len(tokens)
            if token == EOS and len(tokens) > params["min_new_tokens"]:
                finish = {"type": "stop", "matched": EOS}
                break
        meta: dict[str, Any] = {"finish_reason": finish, "output_token_logprobs": pairs}
        if body.get("return_sampling_mask") and self.returns_kept:
            places = range(len(prompt), len(prompt) + len(tokens))
            meta["output_token_sampling_mask"] = [kept_at(*one) for one in zip(tokens, places)]
            meta["output_token_sampling_logprobs"] = [pair[0] for pair in pairs]
        if self.tells != "nothing":
            meta["weight_version"] = spans[-1]["version"] if spans else str(first_version)
        if self.tells == "spans":
            meta["weight_versions"] = spans
        return {"output_ids": tokens, "text": "", "meta_info": meta}

    async def _hold(self, position: int, aborts: int) -> None:
        here = (position, aborts)
        self._reached.append(here)
        while self._is_held(here):
            await asyncio.sleep(0.002)
        self._reached.remove(here)

    def _is_held(self, place: tuple[int, int]) -> bool:
        position, aborts = place
        return self.holds_at is not None and position >= self.holds_at and aborts == self._aborts

    def wait_until_held(self, count: int = 1) -> None:
        """Return once so many completions wait at `holds_at`."""
        deadline = time.monotonic() + 120
        while sum(map(self._is_held, list(self._reached))) < count:
            assert time.monotonic() < deadline, f"{count} completions must reach position {self.holds_at}"
            time.sleep(0.002)

    async def _pause(self, _: web.Request) -> web.Response:
        self._resumed.clear()
        self.is_paused = True
        self.abort_all()
        return web.Response(text="paused")

    async def _continue(self, _: web.Request) -> web.Response:
        self._resumed.set()
        self.is_paused = False
        return web.Response(text="continued")

    def _needs(self, *parts: str) -> None:
        if missing := self.asleep & set(parts):
            self._die(f"it computes without its {missing}")

    def _die(self, why: str) -> None:
        self.deaths.append(why)
        raise web.HTTPInternalServerError(text=why)

    async def _flush(self, _: web.Request) -> web.Response:
        deadline = time.monotonic() + 60  # waits until nothing runs, for as long as it is told
        while self._reached and time.monotonic() < deadline:
            await asyncio.sleep(0.002)
        return web.Response(text="Cache flushed.", status=400 if self._reached else 200)

    async def _release(self, request: web.Request) -> web.Response:
        tags = set((await request.json())["tags"])
        if self._reached or not self.is_paused or self.asleep & tags:
            self._die(f"it gives back {tags} of what {self.asleep} left, running {len(self._reached)}")
        self.asleep |= tags
        return web.json_response(None)

    async def _take_back(self, request: web.Request) -> web.Response:
        tags = set((await request.json())["tags"])
        if not tags <= self.asleep:
            self._die(f"it takes back {tags}, of which it has all but {self.asleep}")
        self.asleep -= tags
        return web.json_response(None)

    async def _from_disk(self, request: web.Request) -> web.Response:
        self._needs("weights")
        body = await request.json()
        self.updates.append(body)
        with open(f"{body['model_path']}/weights") as file:
            self._staged, self._staged_version = {"disk": file.read()}, int(body["weight_version"])
        if not body.get("only_stage"):
            self._swap()
        return web.json_response({"success": True})

    async def _join(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.joins.append(body)
        name, world_size = body["group_name"], body["world_size"]

        def join(rank: int) -> BroadcastGroup:
            place, more = (body["master_address"], body["master_port"]), {"backend": body.get("backend", "gloo")}
            return join_group(*place, rank, world_size, name, timeout_s=body.get("timeout_s", 60.0), **more)

        ranks = range(body["rank_offset"], body["rank_offset"] + self.tp_size)
        try:
            self._groups[name] = await asyncio.gather(*(asyncio.to_thread(join, rank) for rank in ranks))
        except (ConnectionError, ValueError) as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True})

    async def _leave(self, request: web.Request) -> web.Response:
        groups = self._groups.pop((await request.json())["group_name"], [])
        for group in groups:
            close_group(group)
        return web.json_response({"success": bool(groups)})

    async def _begin(self, _: web.Request) -> web.Response:
        self._staged = {}
        return web.json_response({"success": True})

    async def _stage(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.updates.append(body)
        specs = [ParamSpec(n, tuple(s), d) for n, s, d in zip(body["names"], body["shapes"], body["dtypes"])]
        name = body["group_name"]
        names = name if isinstance(name, list) else [name] * len(specs)
        by_rank = [[self._groups[one][rank] for one in names] for rank in range(self.tp_size)]
        try:
            sizes = body.get("bucket_sizes") or [len(specs)]
            receiving = (asyncio.to_thread(lambda one=one: [*receive_buckets(one, specs, sizes)]) for one in by_rank)
            buckets, *_ = await asyncio.gather(*receiving)
        except ConnectionError as error:
            for group in itertools.chain(*(self._groups.pop(one) for one in set(names))):
                close_group(group)
            return web.json_response({"success": False, "message": str(error)}, status=400)
        for bucket in buckets:
            (self.weights if self._staged is None else self._staged).update(bucket)
        if body["weight_version"] is not None and self._staged is None:
            self.version = int(body["weight_version"])
        elif body["weight_version"] is not None:
            self._staged_version = int(body["weight_version"])
        return web.json_response({"success": True})

    async def _end(self, request: web.Request) -> web.Response:
        assert self._staged is not None
        if not (request.can_read_body and (await request.json()).get("only_stage")):
            self._swap()
        return web.json_response({"success": True})

    def _swap(self) -> None:
        assert self._staged is not None
        self.weights, self._staged = self.weights | self._staged, None
        self.version = self._staged_version

    async def close(self, _: web.Application) -> None:
        for group in itertools.chain(*self._groups.values()):
            close_group(group)


@contextlib.contextmanager
def serve(server: ScriptedServer, port: int = 0) -> Iterator[ScriptedServer]:
    """Run a server on loopback until the block ends; `port` 0 is any."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> web.AppRunner:
        app = server.app()
        app.on_cleanup.append(server.close)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        server.address = f"127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def stop(runner: web.AppRunner) -> None:
        await runner.cleanup()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(120)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(stop(runner), loop).result(120)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(120)
        loop.close()
