"""A proxy that makes the inference server behind it look unreliable.

What becomes of the n-th request to /generate is a function of (seed, n): most are passed on, some are answered late,
with status 500, with half a JSON, with NaN in place of a logprob, or not at all. One call that brings weights is
refused, the `refused`-th. Everything else passes untouched.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Literal, get_args

from harness.proxy import Request, pass_on, reply, with_body

Fault = Literal[
    "slow", "hang_up_before", "hang_up_after", "hang_up_amid", "status_500", "truncated_json", "nan_logprob"
]
FAULTS: tuple[Fault, ...] = get_args(Fault)
REFUSED = "refused_weights"
FAULTY_SHARE = 0.15
MAX_SLOW_S = 3.0
_READ_ONLY = ("/health", "/get_model_info", "/server_info")
_STATUS_500 = reply(b'{"error": {"message": "out of luck"}}', status="500 Internal Server Error")


class FlakyProxy:
    """Passes requests on, or not; `answer` is for `harness.proxy.answering`."""

    def __init__(self, server: str, *, seed: str, refused: int) -> None:
        self._server = server
        self._seed = seed
        self._refused = refused
        """Call of a weight endpoint to refuse; -1 is none."""
        self._generated = itertools.count()
        self._controlled = itertools.count()
        self.faults: Counter[str] = Counter()

    async def answer(self, request: Request) -> AsyncIterator[bytes]:
        """Answer one request."""
        if request.path == "/generate":
            rng = random.Random(f"{self._seed}/{next(self._generated)}")
            if rng.random() < FAULTY_SHARE:
                fault = rng.choice(FAULTS)
                self.faults[fault] += 1
                async for piece in self._harm(fault, request, rng):
                    yield piece
                return
        elif request.path not in _READ_ONLY and next(self._controlled) == self._refused:
            self.faults[REFUSED] += 1
            yield _STATUS_500
            return
        yield await self._pass_on(request)

    async def _harm(self, fault: Fault, request: Request, rng: random.Random) -> AsyncIterator[bytes]:
        if fault == "slow":
            await asyncio.sleep(rng.uniform(0, MAX_SLOW_S))
        if fault == "hang_up_before":
            return
        if fault == "status_500":
            yield _STATUS_500
            return
        answer = await self._pass_on(request)
        head, _, body = answer.partition(b"\r\n\r\n")
        if fault == "hang_up_amid":
            yield answer[: len(head) + 4 + len(body) // 2]
        elif fault == "truncated_json":
            yield with_body(answer, body[: len(body) // 2])
        elif fault == "nan_logprob":
            yield with_body(answer, _with_nan(body))
        elif fault == "slow":
            yield answer

    async def _pass_on(self, request: Request) -> bytes:
        try:
            return await pass_on(self._server, request)
        except OSError as error:
            return reply(json.dumps({"error": {"message": repr(error)}}).encode(), status="502 Bad Gateway")


def _with_nan(body: bytes) -> bytes:
    answer = json.loads(body)
    pairs = answer.get("meta_info", {}).get("output_token_logprobs") or []
    for pair in pairs[:1]:
        pair[0] = float("nan")
    return json.dumps(answer).encode()
