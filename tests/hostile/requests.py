"""Junk towards a real embedded server, registry and Tinker API: requests of every kind, with the secret and without it.

Invariants: a whole request is answered, and never as a defect of the server (500); without the secret nothing is but
GET /health; an honest client is served in between and afterwards; what a server keeps is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import resource
import selectors
import socket
import struct
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from testing_processes import spawn
from tinker import types
from tinker.proto import tinker_public_pb2 as proto
from tiny_models import save_qwen3

from arealite.server import protocol
from hostile.common import DEADLINE_S, JUNK, NESTED, SECRET, Report, Usage, judge_text, settled

Endpoints = dict[str, tuple[dict[str, Any], Iterable[str]]]
"""Request line -> a right body, and the fields that it may have."""
_SOFT_FILES = 1024
"""What a shell usually allows."""
_FLOOD = 1200
_CONNECT_S = 5.0
_AT_ONCE = 32
_HALF_SENT_S = 1.0
"""How long we wait for an answer to a request that may be unfinished."""
_BEARER = f"Authorization: Bearer {SECRET}\r\n"
_REGISTRY = """
import asyncio, os
from arealite.inference.registry import Registry
async def main():
    registry = Registry(os.environ["AREALITE_SECRET"])
    await registry.start()
    print("serving registry at http://" + registry.address, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
_SHORT = {"max_new_tokens": 2}
_GROUP = {"group_name": "g"}
_JOIN = _GROUP | {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "timeout_s": 0.1}
_BUCKET = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]], **_GROUP}
_NO_BODY = frozenset({"x"})
LITE: Endpoints = {
    "POST /generate": ({"input_ids": [5], "sampling_params": _SHORT}, protocol.GenerateBody.model_fields),
    "POST /generate#sampling_params": (_SHORT, protocol.SamplingBody.model_fields),
    "POST /pause_generation": ({}, protocol.PauseBody.model_fields),
    "POST /continue_generation": ({}, _NO_BODY),
    "POST /init_weights_update_group": (_JOIN, protocol.JoinGroupBody.model_fields),
    "POST /destroy_weights_update_group": (_GROUP, protocol.LeaveGroupBody.model_fields),
    "POST /begin_weight_update": ({}, _NO_BODY),
    "POST /update_weights_from_distributed": (_BUCKET, protocol.BucketBody.model_fields),
    "POST /end_weight_update": ({"fingerprints": {"a": "b"}}, protocol.VerifiedBody.model_fields),
    "POST /update_weights_from_disk": ({"model_path": "/none"}, protocol.DiskUpdateBody.model_fields),
    **{line: ({}, _NO_BODY) for line in ("GET /health", "GET /server_info", "PUT /generate")},
}
_ENTRY = {"name": "x", "address": "a:1", "backend": "lite", "incarnation": "i"}
_ENTRY |= {"state": "ready", "detail": "", "since": 1.0}
_BOARD: Endpoints = {
    "POST /servers": (_ENTRY, _ENTRY),
    "GET /servers?wait_s=0&after=x": ({}, _NO_BODY),
    "DELETE /servers?incarnation=i": ({}, _NO_BODY),
}
_ADAM = {"learning_rate": 1e-3}
_PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
_TINKER: Endpoints = {  # of the path after /api/v1, with MODEL, SESSION and SAMPLER of an honest client
    "create_session": ({}, _NO_BODY),
    "session_heartbeat": ({"session_id": "SESSION"}, ("session_id",)),
    "create_model": (
        {"session_id": "SESSION", "model_seq_id": 9, "base_model": "BASE", "lora_config": {"rank": 2}},
        types.CreateModelRequest.model_fields,
    ),
    "get_info": ({"model_id": "MODEL"}, ("model_id",)),
    "weights_info": ({"tinker_path": "tinker://MODEL/weights/../../x"}, ("tinker_path",)),
    "forward_backward": ({}, _NO_BODY),
    "optim_step": ({"model_id": "MODEL", "seq_id": 8, "adam_params": _ADAM}, types.OptimStepRequest.model_fields),
    "save_weights": ({"model_id": "MODEL", "path": "../../up"}, types.SaveWeightsRequest.model_fields),
    "save_weights_for_sampler": ({"model_id": "MODEL"}, types.SaveWeightsForSamplerRequest.model_fields),
    "load_weights": (
        {"model_id": "MODEL", "path": "tinker://MODEL/weights/none", "optimizer": True},
        types.LoadWeightsRequest.model_fields,
    ),
    "create_sampling_session": (
        {"session_id": "SESSION", "sampling_session_seq_id": 1, "base_model": "BASE"},
        types.CreateSamplingSessionRequest.model_fields,
    ),
    "asample": (
        {"sampling_session_id": "SAMPLER", "prompt": _PROMPT, "sampling_params": {"max_tokens": 2}},
        types.SampleRequest.model_fields,
    ),
    "retrieve_future": ({"request_id": "x"}, types.FutureRetrieveRequest.model_fields),
    "sessions/x/finish": ({}, _NO_BODY),
    "samplers/x": ({}, _NO_BODY),
}
_TARGETS = (
    *("*", "//", "/%00", "/../x", "/..%2f..", "http://[::1", "http://a/generate", "/\ud800", "/" + "a" * 70_000, ""),
)
_PIECES = (b"\r\n", b"\n", b"\r", b"\0", b"\xff" * 9, b" " * 999, b"\r\n\r\n", b":", b"A" * 70_000, b"\x16\x03\x01\x02")
_NO_JSON = (b"", b"{", b"[" * NESTED, b'{"a":' * NESTED, b"\xff\xfe{}", b"\0" * 99, b"9" * 5000, b"1e999", b"NaN")
_HEADERS = (
    *("Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: 0x10", "Content-Length: +5"),
    *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: \x0b chunked", "Host: "),
    *("Expect: 100-continue", "Upgrade: websocket", "Connection: close, close", "Content-Encoding: gzip", "no colon"),
    *("Content-Type: text/html; charset=nonsense", "Authorization: Bearer \u0416", "X: " + "y" * 9000, "Cookie: =;=,"),
)


@dataclass(frozen=True)
class Target:
    """A server under fire."""

    name: str
    address: str
    pid: int
    log: Path
    endpoints: Endpoints
    model: str

    def ask(self, line: str, body: object = None) -> Any:
        """Send an honest request."""
        method, path = line.split()
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{self.address}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
            return json.load(reply)

    def honest(self) -> None:
        """Do what a run does, and check the answers."""
        if self.name == "registry":
            self.ask("POST /servers", _ENTRY | {"address": "honest:1", "incarnation": "honest"})
            assert "honest" in self.ask("GET /servers")["servers"], "it forgets who registers"
            return
        if self.name == "tinker":
            assert self.client()["MODEL"].endswith(":train:0"), "it makes no model"
            return
        self.ask("POST /continue_generation", {})
        self.ask("POST /update_weights_from_disk", {"model_path": self.model, "weight_version": "7"})
        sampling = {"max_new_tokens": 4, "ignore_eos": True}
        answer = self.ask("POST /generate", {"input_ids": [5, 6, 7], "sampling_params": sampling})
        assert len(answer["output_ids"]) == 4 and answer["meta_info"]["weight_version"] == "7", f"it answers {answer}"

    def client(self) -> dict[str, str]:
        """Open a session of the Tinker API, and return its names of things."""
        found = {"SESSION": self.ask("POST /api/v1/create_session", {})["session_id"], "BASE": self.model}
        body = {"session_id": found["SESSION"], "model_seq_id": 0, "base_model": self.model, "lora_config": {"rank": 2}}
        future = self.ask("POST /api/v1/create_model", body)["request_id"]
        found["MODEL"] = self.ask("POST /api/v1/retrieve_future", {"request_id": future})["model_id"]
        body = {"session_id": found["SESSION"], "sampling_session_seq_id": 0, "base_model": self.model}
        found["SAMPLER"] = self.ask("POST /api/v1/create_sampling_session", body)["sampling_session_id"]
        return found


def attack(report: Report, folder: Path, rng: random.Random, *, short: bool) -> None:
    """Try all groups at each server."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    model = save_qwen3(folder / "model", seed=1)
    lite = ["arealite.server", "--model-path", model, "--port", "0", "--context", "64", "--slots", "8"]
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(serving("lite", ["-m", *lite], folder, LITE, model))
        other = stack.enter_context(serving("registry", ["-c", _REGISTRY], folder, _BOARD, model))
        small = ["lite.context=64", "gconfig.max_new_tokens=32", f"cluster.fileroot={folder}"]
        words = ["-m", "arealite.cli.main", "tinker", "--model", model, "--port", "0", *small]
        third = with_names(stack.enter_context(serving("tinker", words, folder, {}, model)))
        for target in (one, other, third):
            attack_one(report, target, rng, short=short)


@contextlib.contextmanager
def serving(name: str, program: list[str], folder: Path, endpoints: Endpoints, model: str) -> Iterator[Target]:
    """Start a server that may have as many files open as a shell usually allows, and end it."""
    log, env = folder / f"{name}.txt", os.environ | {"AREALITE_SECRET": SECRET}
    limited = ["sh", "-c", f'ulimit -Sn {_SOFT_FILES}; exec "$@"', "sh", sys.executable, *program]
    with log.open("wb") as file:
        process = spawn(limited, env=env, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 2 * DEADLINE_S
        while b"at http://" not in (text := log.read_bytes()) or not text.endswith(b"\n"):
            assert process.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.1)
        address = text.partition(b"at http://")[2].split()[0].decode().rstrip(";")
        yield Target(name, address, process.pid, log, endpoints, model)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def attack_one(report: Report, target: Target, rng: random.Random, *, short: bool) -> None:
    """Try all groups at a server, and see after each whether it still serves."""
    bodies = list(junk_bodies(target.endpoints))
    rng.shuffle(bodies)
    broken_heads = [mutated(rng, *rng.choice(bodies[:50])) for _ in range(150 if short else 1500)]
    bodies = bodies[: 400 if short else len(bodies)]
    refused = bodies[: len(bodies) // 4]
    groups = {
        "bodies": [(whole(line, body), True, True) for line, body in bodies],
        "no secret": [(whole(line, body, secret=False), True, False) for line, body in refused],
        "broken requests": [(data, False, True) for data in broken_heads],
    }
    if target.name == "tinker":
        line, model = "POST /api/v1/forward_backward", target.client()["MODEL"]
        sent_messages = messages(rng, model, 100 if short else 1000)
        groups["messages"] = [(whole(line, body), True, True) for body in sent_messages]
    target.honest()
    before, sent = Usage.of(target.pid, target.log), 0
    for name, inputs in groups.items():
        asyncio.run(fire(report, target, inputs))
        sent += len(inputs)
        judge(report, target, name, before, sent)
    with half_sent(target, _FLOOD):
        sent += _FLOOD
        report.count(f"{_FLOOD} half-sent")
        judge(report, target, f"{_FLOOD} connections", None, sent)
    judge(report, target, "connections that ended", before, sent)
    report.broken += judge_text(f"the log of {target.name}", target.log.read_text(errors="replace"))


def judge(report: Report, target: Target, group: str, before: Usage | None, sent: int) -> None:
    """Let an honest client ask, and measure what the server keeps."""
    began = time.monotonic()
    try:
        target.honest()
    except (OSError, AssertionError, ValueError, LookupError, TypeError) as error:
        text = f"{target.name} must serve an honest client within {DEADLINE_S:g} s of {group}: got {error!r}"
        report.broken.append(text)
    if before is not None:
        what = f"{target.name} after {group}"
        leaks = settled(lambda: before.leaks(Usage.of(target.pid, target.log), what=what, inputs=sent))
        report.leaks += leaks
    print(f"{target.name}: {group}, {sent} inputs so far; judged in {time.monotonic() - began:.1f} s", flush=True)


def junk_bodies(endpoints: Endpoints) -> Iterator[tuple[str, bytes]]:
    """Yield request lines and bodies: every value in every field, unknown and missing fields, and what is no JSON."""
    for line, (right, fields) in endpoints.items():
        for key in fields:
            for value in JUNK:
                yield line, dumped(line, right | {key: value})
            if key != "timeout_s":  # without it a group may take minutes to form
                yield line, dumped(line, {name: value for name, value in right.items() if name != key})
        yield line, dumped(line, right | {"unknown": 1})
        for raw in _NO_JSON:
            yield line, raw
        yield line, dumped(line, right | {"unknown": 1}).replace(b":", b":" + b"[" * NESTED, 1)


def dumped(line: str, fields: dict[str, Any]) -> bytes:
    """Return a body, or one with a block of it that the line names after `#`."""
    block = line.partition("#")[2]
    return json.dumps({"input_ids": [5], block: fields} if block else fields).encode()


def with_names(target: Target) -> Target:
    """Return the Tinker API with bodies that name a model, a session and a sampler which it has."""
    text, found = json.dumps({line: [right, [*fields]] for line, (right, fields) in _TINKER.items()}), target.client()
    for name, value in found.items():
        text = text.replace(name, value)
    endpoints = {f"POST /api/v1/{path}": (right, fields) for path, (right, fields) in json.loads(text).items()}
    trainers = [
        one for one in psutil.Process(target.pid).children(recursive=True) if "serve.py" in " ".join(one.cmdline())
    ]
    return replace(target, endpoints=endpoints, pid=trainers[-1].pid)


def messages(rng: random.Random, model: str, count: int) -> Iterator[bytes]:
    """Yield messages for forward_backward, most of them damaged."""
    values = proto.Tensor(dense=struct.pack("<2q", 6, 7), dtype=proto.DTYPE_INT64, shape=[2])
    weights = proto.Tensor(dense=struct.pack("<2f", 1.0, 1.0), dtype=proto.DTYPE_FLOAT32, shape=[2])
    text = proto.Chunk(encoded_text=proto.EncodedTextChunk(tokens=struct.pack("<2i", 5, 6)))
    datum = proto.Datum(model_input=[text], loss_fn_inputs={"target_tokens": values, "weights": weights})
    right = proto.ForwardBackwardRequest(model_id=model, seq_id=1, data=[datum], loss_fn="cross_entropy")
    for number in range(count):
        right.seq_id = number + 1
        damaged = bytearray(right.SerializeToString())
        for _ in range(rng.randrange(4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        yield bytes(damaged[: rng.choice([len(damaged), rng.randrange(len(damaged))])])


def whole(line: str, body: bytes, *, secret: bool = True) -> bytes:
    """Return a request that is right as HTTP."""
    target = line.partition("#")[0]
    head = f"{target} HTTP/1.1\r\nHost: x\r\n{_BEARER if secret else ''}Content-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def mutated(rng: random.Random, line: str, body: bytes) -> bytes:
    """Return a request that is wrong as HTTP in one to three ways."""
    data = whole(line, body[:2000])
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0:
                data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 1:
                data = data[:at] + rng.choice(_PIECES) + data[at:]
            case 2:
                data = data[:at]
            case 3:
                data += data[at:]
            case 4:
                first, _, rest = data.partition(b"\r\n")
                data = b"\r\n".join([first, rng.choice(_HEADERS).encode(), rest])
            case 5:
                first, _, rest = data.partition(b" ")
                path = rng.choice(_TARGETS).encode(errors="surrogatepass")
                data = b" ".join([rng.choice([first, b"BREW", b"CONNECT", b"\0"]), path, b"HTTP/1.1", rest])
            case 6:
                head = data.partition(b"\r\n\r\n")[0]
                size = rng.choice([b"zz", b"-1", b"f" * 20, b"5;" + b"x" * 9999, b"5", b"0", b""])
                data = head + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + size + b"\r\n{}\r\n"
    # aiohttp's own answer to any other Expect repeats it, which fails with a 500 at bytes that are no text.
    return re.sub(rb"(?i)expect:[^\r\n]*[\x80-\xff]", b"Expect: 100-continue", data)


async def fire(report: Report, target: Target, inputs: list[tuple[bytes, bool, bool]]) -> None:
    """Send everything, some at once, and count and judge the answers."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def shoot(data: bytes, is_whole: bool, has_secret: bool) -> None:
        async with turns:
            status = await exchange(target.address, data, DEADLINE_S if is_whole else _HALF_SENT_S)
        report.count(f"{target.name} {status}")
        is_open = data.startswith(b"GET /health") and target.name == "lite"
        shown = f"{data[:200]!r} ... {data[-80:]!r}".replace(SECRET, "...")
        if is_whole and not has_secret and not is_open and status != "401":
            report.broken.append(f"{target.name} must refuse {shown} without the secret: got {status}")
        elif status.startswith("5") or (is_whole and not status.isdecimal()):
            report.broken.append(f"{target.name} must answer {shown} with 200 or 4xx: got {status}")

    async def go_on() -> None:
        """Undo pauses, during which completions wait as they should."""
        while True:
            await exchange(target.address, whole("POST /continue_generation", b"{}"), DEADLINE_S)
            await asyncio.sleep(0.2)

    going_on = asyncio.create_task(go_on()) if "POST /continue_generation" in target.endpoints else None
    await asyncio.gather(*(shoot(*one) for one in inputs))
    if going_on is not None:
        going_on.cancel()


async def exchange(address: str, data: bytes, timeout_s: float) -> str:
    """Send bytes and return the status of the answer, or how it failed to come."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(data)
                answer = await reader.readline()
            finally:
                writer.transport.abort()
    except TimeoutError:
        return "silence"
    except OSError:
        return "hung up"
    return answer.split(b" ")[1].decode(errors="replace")[:3] if answer.startswith(b"HTTP/1.") else "hung up"


@contextlib.contextmanager
def half_sent(target: Target, count: int) -> Iterator[None]:
    """Hold connections that have sent half of a request without the secret."""
    host, _, port = target.address.rpartition(":")
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as waiting:
        for _ in range(count):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex((host, int(port)))
            waiting.register(connection, selectors.EVENT_WRITE)
        deadline = time.monotonic() + _CONNECT_S
        while waiting.get_map() and time.monotonic() < deadline:  # a server that is deaf never takes the last ones
            for key, _ in waiting.select(0.5):
                with contextlib.suppress(OSError):
                    key.fileobj.send(b"POST /generate HTTP/1.1\r\nHost:")  # type: ignore[union-attr]
                waiting.unregister(key.fileobj)
        yield
