"""Junk from a server towards the real client, while a healthy server stands beside it.

Invariants: a completion ends by the deadline, with what the healthy server sampled or with our own ServerError; so does
a weight update, after which the healthy server has resumed; no task dies unheard, and no error shows the secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import json
import os
import random
import tempfile
import traceback
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from pathlib import Path
from typing import Any

from harness.proxy import Request, answering, pass_on, reply
from testing_raw import REPLIES
from testing_server import ScriptedServer, serve

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.errors import AReaLiteError, ServerError, WeightUpdateError
from arealite.api.io_struct import ModelRequest, WeightUpdateMeta
from arealite.inference.remote_engine import RemoteInferenceEngine
from hostile.common import DEADLINE_S, JUNK, NESTED, SECRET, Report, Usage, judge_text, settled

_REQUEST_S = 2.0
_UPDATE_S = 4.0
_TOKENS = 4
_COMPLETIONS = 4
_GENERATE = ("/generate",)
_UPDATE = ("/pause_generation", "/update_weights_from_disk", "/continue_generation")
_MEET = ("/get_model_info",)


_OPEN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
RAW: dict[str, bytes] = {
    **REPLIES,
    "binary": bytes(range(256)) * 9,
    "TLS": b"\x15\x03\x01\x00\x02\x02\x46",
    "half a status": b"HTTP/1.1 2",
    "status that is text": b"HTTP/1.1 abc OK\r\n\r\n",
    "status 999": reply(status="999 No"),
    "HTTP/9": b"HTTP/9.9 200 OK\r\n\r\n",
    "negative length": _OPEN + b"Content-Length: -5\r\n\r\n{}",
    "huge chunk": _OPEN + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n{}",
    "huge header": _OPEN + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": _OPEN + b"X: y\r\n" * 50_000 + b"\r\n",
    "no colon": _OPEN + b"nonsense\r\n\r\n",
    "unknown encoding": reply(b"junk", "Content-Encoding: zstd"),
    "redirect to itself": reply(b"", "Location: /generate", status="307 T"),
    "redirect to nonsense": reply(b"", "Location: http://[::1", status="302 F"),
    "redirect to nobody": reply(b"", "Location: http://127.0.0.1:1/", status="301 M"),
    "redirect to a file": reply(b"", "Location: file:///etc/passwd", status="308 P"),
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
    "charset": reply(b"\xff\xfe{}", type="application/json; charset=nonsense"),
    "bad type": reply(b"{}", type="\x01;;;"),
    "html": reply(b"<html>", type="text/html"),
    **{
        f"status {status}": reply(b"<html>\xff", status=f"{status} X") for status in (204, 400, 401, 404, 429, 500, 503)
    },
    **{
        f"body {raw!r:.12}": reply(raw) for raw in (b"", b"null", b"[]", b"5", b'"x"', b"NaN", b"{", b"{}", b"\xff\xfe")
    },
    "deep body": reply(b"[" * NESTED),
    "deep object": reply(b'{"meta_info":' * NESTED),
    "refusal with 200": reply(b'{"success": false, "message": ["x"]}'),
}
SLOW = ("silence", "endless header", "endless body", "drips", "echo")
_FIELDS = ("output_ids", "meta_info")
_META = ("finish_reason", "output_token_logprobs", "weight_versions", "weight_version", "stale_kv_tokens")


def falsified(answer: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield right answers with one thing that is wrong."""

    def changed(name: str, **changes: Any) -> tuple[str, bytes]:
        wrong = copy.deepcopy(answer)
        meta = {key: changes.pop(key) for key in list(changes) if key in _META}
        wrong["meta_info"] |= meta
        return name, reply(json.dumps(wrong | changes).encode())

    ids, meta = answer["output_ids"], answer["meta_info"]
    pairs, spans = meta["output_token_logprobs"], meta["weight_versions"]
    yield changed("a logprob too few", output_token_logprobs=pairs[1:])
    yield changed("a logprob too many", output_token_logprobs=[*pairs, pairs[0]])
    yield changed("logprobs of other tokens", output_token_logprobs=pairs[::-1])
    for value in (None, "x", float("nan"), float("inf"), -1e999, True, [], 5.0):
        yield changed(f"logprob {value}", output_token_logprobs=[[value, *pairs[0][1:]], *pairs[1:]])
    for value in (-1, 0.5, "5", None, True, 2**70, [5]):
        of_value = [[pairs[0][0], value, None], *pairs[1:]]
        yield changed(f"token {value}", output_ids=[value, *ids[1:]], output_token_logprobs=of_value)
    yield changed("too many tokens", output_ids=ids * 9, output_token_logprobs=pairs * 9, weight_versions=None)
    for version in ("999", 999, "-1", "x", "", 0.5, [], "9" * 5000, "١"):
        yield changed(f"version {str(version)[:9]}", weight_versions=[spans[0] | {"version": version}])
    yield changed("spans with a gap", weight_versions=[spans[0] | {"start": 1}])
    yield changed("span without an end", weight_versions=[spans[0] | {"end": 10**12}])
    yield changed("backward span", weight_versions=[spans[0] | {"end": -1}])
    yield changed("stale tokens", stale_kv_tokens=99)
    for value in JUNK:
        for key in (*_FIELDS, "finish_reason", "output_token_logprobs"):
            is_missing = key == "output_token_logprobs" and not value and not ids
            if not is_missing:
                yield changed(f"{key} = {value!r:.12}", **{key: value})


class JunkServer:
    """Passes requests on to a good server, but answers `scope` with junk."""

    def __init__(self, good: ScriptedServer, kind: str, raw: bytes | None, scope: tuple[str, ...]) -> None:
        self.good, self.kind, self.raw, self.scope = good, kind, raw, scope
        self.is_junk = True
        self.num_junk = 0

    async def answer(self, request: Request) -> AsyncIterator[bytes]:
        """Answer one request."""
        if request.path not in self.scope or not self.is_junk:
            yield await pass_on(self.good.address, request)
            return
        self.num_junk += 1
        if self.raw is not None:
            yield self.raw
        elif self.kind == "echo":
            yield reply(request.head, status="500 X", type="text/plain")
        elif self.kind == "silence":
            await asyncio.sleep(DEADLINE_S)
        else:
            start = {
                "endless header": b"HTTP/1.1 200 OK\r\n",
                "drips": b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n",
            }
            yield start.get(self.kind, _OPEN + b"Transfer-Encoding: chunked\r\n\r\n")
            while True:
                yield {"endless header": b"X: y\r\n", "drips": b" "}.get(self.kind, b"400\r\n" + b" " * 1024 + b"\r\n")
                await asyncio.sleep(0.01)


def attack(report: Report, folder: Path, rng: random.Random, *, short: bool) -> None:
    """Let a server answer requests, weight updates and first questions with every kind of junk."""
    os.environ["AREALITE_SECRET"] = SECRET
    kinds: dict[str, bytes | None] = RAW | dict.fromkeys(SLOW) | dict(falsified(_right_answer()))
    chosen = [(name, _GENERATE) for name in kinds]
    raw = [*RAW, *SLOW]
    chosen += [(name, (endpoint,)) for endpoint in _UPDATE for name in raw]
    chosen += [(name, _MEET) for name in raw]
    if short:
        always = [*RAW, *SLOW, *(name for name in kinds if "logprob" in name or "version" in name)]
        chosen = [*((name, _GENERATE) for name in always), *rng.sample(chosen, 80)]
    before = Usage.of(os.getpid())
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(lambda one: try_one(folder, *one, kinds[one[0]]), chosen):
            report.add(found)
    gc.collect()  # reports tasks whose errors nobody has seen
    look = lambda: before.leaks(Usage.of(os.getpid()), what="the client", inputs=len(chosen))  # noqa: E731
    report.leaks += settled(look)


def _right_answer() -> dict[str, Any]:
    """Return what a good server answers to the request of `complete`."""
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": _TOKENS, "min_new_tokens": 0}}
    return asyncio.run(ScriptedServer()._sample(body))


def try_one(folder: Path, kind: str, scope: tuple[str, ...], raw: bytes | None) -> Report:
    """Connect a client to a healthy server and one that answers `scope` with junk, and use it."""
    report, what = Report(), f"a client of a server that answers {scope[0]} with {kind}"
    healthy, good = ScriptedServer(), ScriptedServer()
    with contextlib.ExitStack() as stack:
        stack.enter_context(serve(healthy))
        stack.enter_context(serve(good))
        junk = JunkServer(good, kind, raw, scope)
        address = stack.enter_context(answering(junk.answer))
        junk.is_junk = scope == _MEET
        addresses = [address, healthy.address]
        setup_s = _UPDATE_S if scope == _MEET else DEADLINE_S
        config = InferenceEngineConfig(
            server_addrs=addresses, backend="lite", request_timeout=_REQUEST_S, setup_timeout=setup_s
        )
        engine = RemoteInferenceEngine(config)
        stack.callback(engine.destroy)
        try:
            engine.initialize(None, None)
        except AReaLiteError as error:
            report.errors[type(error).__name__] += 1
            report.broken += judge_error(what, error, expected=AReaLiteError)
            if scope != _MEET:
                report.broken.append(f"{what} must begin: got {error}")
            return report
        except Exception as error:
            report.broken += judge_error(what, error, expected=AReaLiteError)
            return report
        finally:
            report.tried += 1
        junk.is_junk = True
        if scope[0] in _UPDATE:
            update(report, engine, folder, what)
        complete(report, engine, what)
        report.broken += [f"{what} must meet it: it never did"] * (junk.num_junk == 0)
        if healthy.is_paused:
            report.broken.append(f"{what} must let the healthy server continue: it is paused")
    return report


def complete(report: Report, engine: RemoteInferenceEngine, what: str) -> None:
    """Sample completions, and judge each of them."""
    gconfig = GenerationHyperparameters(max_new_tokens=_TOKENS)
    loop = engine._require_executor().loop
    requests = [ModelRequest([5], gconfig, rid=str(number)) for number in range(_COMPLETIONS)]
    for future in [loop.submit(engine.agenerate(one)) for one in requests]:
        error = outcome(future)
        report.errors["finished" if error is None else type(error).__name__] += 1
        if error is not None:
            report.broken += judge_error(what, error, expected=ServerError)
            continue
        found = future.result()
        sound = len(found.output_tokens) == len(found.output_logprobs) == len(found.output_versions) == _TOKENS
        # Versions that are too new are refused later, with the trajectory.
        sound = sound and max(found.output_logprobs) <= 0.0 and min(found.output_versions) >= 0
        if not sound or any(type(token) is not int or not 0 <= token < 1000 for token in found.output_tokens):
            report.broken.append(f"{what} must refuse that: got {found}")


def update(report: Report, engine: RemoteInferenceEngine, folder: Path, what: str) -> None:
    """Publish weights through the disk."""
    path = Path(tempfile.mkdtemp(prefix="weights-", dir=folder))
    (path / "weights").write_text("new")
    meta = WeightUpdateMeta(type="disk", path=str(path), timeout_s=_UPDATE_S)
    future = engine.update_weights(meta)
    meta.transfer.uploaded.set_result(None)
    error = outcome(future)
    report.errors["updated" if error is None else type(error).__name__] += 1
    if error is not None:
        report.broken += judge_error(f"{what} in a weight update", error, expected=WeightUpdateError)
    else:
        engine.set_version(1)


def outcome(future: Future[Any]) -> BaseException | None:
    """Return the error that something ends with; a TimeoutError of ours if it does not end."""
    try:
        return future.exception(DEADLINE_S)
    except NotInTime:
        future.cancel()
        return NotInTime(f"no end within {DEADLINE_S:g} s")


def judge_error(what: str, error: BaseException, *, expected: type[Exception]) -> list[str]:
    """Say what is wrong with an error that our client has raised."""
    text = "".join(traceback.format_exception(error)) + repr(error)
    broken = judge_text(f"the error of {what}", text, dead=())
    if not isinstance(error, expected):
        broken.append(f"{what} must end with {expected.__name__}: got {text[-1500:]}")
    return broken
