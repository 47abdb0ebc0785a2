"""Simulated inference servers: continuous batching in closed form, behind the client's own HTTP calls.

A decode step takes `step_s + sequence_s * running + context_s * tokens in the caches`, and all running sequences
advance together. So the next end is the smallest of the steps at which sequences end, and the time until then is the
root of a quadratic: a completion costs a few events, not one per token.
"""

import asyncio
import contextlib
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from arealite.inference.http import Json
from arealite.planner.scenario import ServerProfile

_FULL_SHARE = 0.97  # of the cache, above which no sequence starts
_LATE_S = 1e-7  # by which a timer comes later than the end that it is for, as equal floats may differ
_STEP_SLACK = 1e-3


@dataclass(eq=False)
class _Sequence:
    """A request of a server."""

    prompt: int  # tokens that are prefilled: the prompt's, and those sampled before a retraction
    left: float  # tokens to sample from here on
    prefix: tuple[int, ...]
    ended: "asyncio.Future[bool]"  # False if it was aborted
    spans: list[tuple[int, int]]  # versions, and the token from which on each was used
    begun: float = 0.0  # the server's step at which it started
    num_before: float = 0.0  # tokens sampled before a retraction
    num_aborted: int = 0  # tokens sampled until it was aborted
    runs: bool = False

    def num_sampled(self, step: float) -> float:
        return self.num_before + (min(step - self.begun, self.left) if self.runs else 0.0)


@dataclass(eq=False)
class SimulatedServer:
    """One server, which speaks SGLang's protocol."""

    address: str
    profile: ServerProfile
    loop: asyncio.AbstractEventLoop
    speed: float = 1.0
    version: int = 0
    busy_s: float = 0.0
    slot_s: float = 0.0  # seconds times running sequences
    is_dead: bool = False
    hangs: bool = False  # dead without closing its connections, as a node that is gone
    _staged: int | None = None
    _is_paused: bool = False
    _ends: list[tuple[float, int, _Sequence]] = field(default_factory=list)  # a heap: at which step, order, sequence
    _waiting: deque[_Sequence] = field(default_factory=deque)
    _in_flight: dict[_Sequence, None] = field(default_factory=dict)
    _prefixes: dict[tuple[int, ...], int] = field(default_factory=dict)  # tokens of them that the cache holds
    _num_running: int = 0
    _context: float = 0.0  # tokens in the caches
    _step: float = 0.0  # decode steps so far
    _prefill_left_s: float = 0.0  # which decoding waits for
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self._since = self.loop.time()
        self._order = itertools.count()
        self._draw = random.Random(self.address)

    # Time

    def _cost(self) -> tuple[float, float]:
        """Return the seconds of the next step, and by how much each later one takes longer."""
        profile, running = self.profile, self._num_running
        context_s = profile.context_s * profile.grain
        step_s = profile.step_s + profile.sequence_s * running + context_s * self._context
        return step_s * profile.grain / self.speed, context_s * running * profile.grain / self.speed

    def _advance(self) -> None:
        """Bring the state up to now; nothing ends before now."""
        now = self.loop.time()
        passed_s, self._since = now - self._since, now
        if self._is_paused or passed_s <= 0:
            return
        if self._num_running or self._prefill_left_s:
            self.busy_s += passed_s
        self.slot_s += passed_s * self._num_running
        prefilled_s = min(self._prefill_left_s, passed_s)
        self._prefill_left_s -= prefilled_s
        passed_s -= prefilled_s
        if not self._num_running or passed_s <= 0:
            return
        first, growth = self._cost()
        if growth > 0:
            linear = first - growth / 2
            num_steps = (math.sqrt(linear * linear + 2 * growth * passed_s) - linear) / growth
        else:
            num_steps = passed_s / first
        num_steps = min(num_steps, self._ends[0][0] - self._step)
        self._step += num_steps
        self._context += num_steps * self._num_running

    def _schedule(self) -> None:
        """Set the timer to the next end, or to the moment when the cache is full."""
        if self._timer is not None:
            self._timer.cancel()
        running = self._num_running
        if self._is_paused or self.is_dead or not running:
            return
        num_steps = max(0.0, self._ends[0][0] - self._step)
        if running > 1 and self._context + num_steps * running > self.profile.cache_tokens:
            num_steps = max(0.0, (self.profile.cache_tokens - self._context) / running)
        first, growth = self._cost()
        seconds = self._prefill_left_s + num_steps * first + max(0.0, growth * num_steps * (num_steps - 1) / 2)
        self._timer = self.loop.call_later(max(0.0, seconds) + _LATE_S, self._tick)

    def _tick(self) -> None:
        self._advance()
        while self._ends and self._ends[0][0] <= self._step + _STEP_SLACK:
            sequence = heapq.heappop(self._ends)[2]
            self._stop(sequence)
            if not sequence.ended.done():
                sequence.ended.set_result(True)
        if self._num_running > 1 and self._context >= self.profile.cache_tokens - 1:
            self._retract()
        self._admit()
        self._schedule()

    # Sequences

    def _admit(self) -> None:
        """Start waiting sequences while there are slots and cache."""
        profile, free = self.profile, _FULL_SHARE * self.profile.cache_tokens
        while self._waiting and self._num_running < profile.slots:
            sequence = self._waiting.popleft()
            if sequence.ended.done():
                continue
            if self._num_running and self._context + sequence.prompt >= free:
                self._waiting.appendleft(sequence)
                return
            cached = self._prefixes.get(sequence.prefix, 0)  # samples of a group share their prompt's cache
            self._prefixes[sequence.prefix] = max(cached, sequence.prompt)
            fresh = sequence.prompt - min(cached, sequence.prompt)
            self._prefill_left_s += (profile.prefill_s * fresh * profile.grain + profile.request_s) / self.speed
            sequence.begun, sequence.runs = self._step, True
            self._num_running += 1
            self._context += sequence.prompt
            heapq.heappush(self._ends, (self._step + sequence.left, next(self._order), sequence))

    def _stop(self, sequence: _Sequence) -> None:
        """Take a running sequence out of the batch."""
        sequence.runs = False
        self._num_running -= 1
        self._context -= sequence.prompt + (self._step - sequence.begun)

    def _forget(self, sequence: _Sequence) -> None:
        """Take a running sequence out of the batch before its end."""
        self._stop(sequence)
        self._ends = [item for item in self._ends if item[2] is not sequence]
        heapq.heapify(self._ends)

    def _retract(self) -> None:
        """Let the newest sequence give its cache back; it continues later, with what it has."""
        sequence = max((one for _, _, one in self._ends), key=lambda one: one.begun)
        num_sampled = self._step - sequence.begun
        self._forget(sequence)
        sequence.num_before += num_sampled
        sequence.left -= num_sampled
        sequence.prompt += int(num_sampled)
        self._waiting.appendleft(sequence)

    def _clear(self) -> None:
        """Forget every sequence."""
        for sequence in self._in_flight:
            sequence.runs = False
        self._ends.clear()
        self._waiting.clear()
        self._prefixes.clear()
        self._num_running, self._context, self._prefill_left_s = 0, 0.0, 0.0

    async def _generate(self, body: Json) -> Json:
        prompt, sampling = body["input_ids"], body["sampling_params"]
        sequence = _Sequence(
            prompt=len(prompt),
            left=sampling["max_new_tokens"],
            prefix=tuple(prompt[:4]),
            ended=self.loop.create_future(),
            spans=[(self.version, 0)],
        )
        is_whole = False
        if not self._is_paused:
            self._advance()
            self._waiting.append(sequence)
            self._admit()
            self._schedule()
            self._in_flight[sequence] = None
            try:
                is_whole = await sequence.ended
            except asyncio.CancelledError:
                self._hang_up(sequence)
                raise
            finally:
                self._in_flight.pop(sequence)
        num_tokens = round(sequence.num_before + sequence.left) if is_whole else sequence.num_aborted
        return self._reply(sequence, num_tokens, is_whole)

    def _reply(self, sequence: _Sequence, num_tokens: int, is_whole: bool) -> Json:
        ends = [start for _, start in sequence.spans[1:]] + [num_tokens]
        spans = [
            {"version": str(version), "start": min(start, num_tokens), "end": min(end, num_tokens)}
            for (version, start), end in zip(sequence.spans, ends, strict=True)
        ]
        meta_info = {
            "finish_reason": {"type": "stop" if is_whole else "abort", "matched": None},
            "output_token_logprobs": [[-0.5, 7, None]] * num_tokens,
            "weight_version": spans[-1]["version"],
            "weight_versions": spans,
        }
        return {"output_ids": [7] * num_tokens, "meta_info": meta_info}

    def _hang_up(self, sequence: _Sequence) -> None:
        """End the sequence of a client that waits no longer."""
        self._advance()
        if sequence.runs:
            self._forget(sequence)
        self._admit()
        self._schedule()

    # Weight updates, and faults

    def _pause(self, mode: str) -> None:
        """Stop generating. By `abort` requests return with the tokens so far, by `retract` they stay."""
        self._advance()
        self._is_paused = True
        if mode != "retract":
            for sequence in self._in_flight:
                # Rounded at random: a token may stand for many.
                num_tokens = int(sequence.num_sampled(self._step) + self._draw.random())
                num_most = round(sequence.num_before + sequence.left) - 1
                sequence.num_aborted = max(0, min(num_tokens, num_most))
                if not sequence.ended.done():
                    sequence.ended.set_result(False)
            self._clear()
        self._schedule()

    def _resume(self) -> None:
        self._advance()
        if self._is_paused and self._in_flight:  # old keys and values are of no use
            self._prefill_left_s += self._context * self.profile.prefill_s * self.profile.grain / self.speed
            for sequence in self._in_flight:
                version, start = sequence.spans[-1]
                if version != self.version:
                    sequence.spans.append((self.version, max(start, int(sequence.num_sampled(self._step)))))
        self._is_paused = False
        self._admit()
        self._schedule()

    def die(self, *, hangs: bool = False) -> None:
        """End with all requests; clients see their connections close, or nothing at all if it hangs."""
        self._advance()
        self.is_dead, self.hangs = True, hangs
        for sequence in self._in_flight:
            if not hangs and not sequence.ended.done():
                sequence.ended.set_exception(aiohttp.ServerDisconnectedError())
        self._clear()
        self._schedule()

    def restart(self) -> None:
        """Start anew, with weights that nobody knows."""
        self.is_dead = self.hangs = self._is_paused = False
        self.version, self._since = -1, self.loop.time()

    # Requests

    async def handle(self, path: str, body: Json) -> Json:
        """Answer a request as SGLang does."""
        profile = self.profile
        await asyncio.sleep(profile.round_trip_s)
        if self.is_dead:
            if self.hangs:
                await asyncio.sleep(1e6)  # for ever
            raise aiohttp.ClientConnectionError("Connect call failed")
        if path == "/generate":
            return await self._generate(body)
        if path in ("/get_model_info", "/get_server_info"):
            facts = {"model_path": "simulated", "dtype": "bfloat16", "tp_size": 1, "slots": profile.slots}
            return facts | {"enable_deterministic_inference": True}
        if path == "/pause_generation":
            self._pause(body["mode"])
        elif path == "/continue_generation":
            self._resume()
        elif path == "/update_weights_from_distributed":
            num_bytes = 2 * sum(math.prod(shape) for shape in body["shapes"])
            await asyncio.sleep(num_bytes / profile.bytes_per_s)
            if body["weight_version"] is not None:
                self._staged = int(body["weight_version"])
        elif path == "/end_weight_update":
            await asyncio.sleep(profile.swap_s)
            self.version = self.version if self._staged is None else self._staged
        return {}


@dataclass(frozen=True)
class _Reply:
    answer: bytes
    status: int = 200
    content_type: str = "application/json"

    async def read(self) -> bytes:
        return self.answer


class SimulatedSession:
    """Takes the place of an `aiohttp.ClientSession`, and brings requests to the simulated servers."""

    def __init__(self, servers: Mapping[str, SimulatedServer]) -> None:
        self.headers: dict[str, str] = {}
        self.num_calls = 0
        self._servers = servers

    @contextlib.asynccontextmanager
    async def request(self, method: str, url: Any, *, data: bytes | None, allow_redirects: bool) -> Any:
        self.num_calls += 1
        if (server := self._servers.get(url.authority)) is None:
            raise aiohttp.ClientConnectionError("no such server")
        answer = await server.handle(url.path, orjson.loads(data) if data else {})
        yield _Reply(orjson.dumps(answer))

    async def close(self) -> None:
        pass
