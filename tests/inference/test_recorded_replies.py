"""Our backends against what real servers answered (`python -m servers record`), without the servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from servers.models import Reference, write_model
from servers.programs import CONTEXT
from servers.recording import FLIGHT, SEED, new_backend
from servers.subject import prompt, requests
from testing_server import serve

from arealite.api.errors import ServerError
from arealite.api.io_struct import ModelResponse
from arealite.inference.backends.base import Backend, Segment
from arealite.inference.http import ServerConnection, StatusError, deadline_in, open_session

FILES = sorted((Path(__file__).parent / "replies").glob("*.json"))


class Recorded:
    """A server that answers a path with what the real one answered in a case, in the order of the recording."""

    def __init__(self, path: Path) -> None:
        recorded = json.loads(path.read_text())
        self.program: str = recorded["program"]
        self.end_ids: list[int] = recorded["end_ids"]
        self.exchanges: list[dict[str, Any]] = recorded["exchanges"]
        self.address = ""
        self.case = ""
        self.asked: list[tuple[str, Any]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def close(self, _: web.Application) -> None:
        """Nothing is held."""

    def of(self, case: str) -> list[dict[str, Any]]:
        return [one for one in self.exchanges if one["case"] == case]

    async def _answer(self, request: web.Request) -> web.Response:
        payload = await request.json() if request.can_read_body else None
        self.asked.append((str(request.rel_url), payload))
        for one in self.of(self.case):
            if (one["method"], one["endpoint"]) == (request.method, str(request.rel_url)):
                return web.json_response(one["body"], status=one["status"])
        return web.json_response({"detail": "not recorded"}, status=501)

    def run(self, case: str, call: Any) -> Any:
        """Let `call(caller)` ask this server, which answers as in a case."""
        self.case, self.asked = case, []

        async def ask() -> Any:
            async with open_session() as session:
                return await call(ServerConnection(session, self.address, deadline_in(10.0)))

        return asyncio.run(ask())


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.stem)
def recorded(request: pytest.FixtureRequest) -> Iterator[Recorded]:
    server = Recorded(request.param)
    with serve(server):
        yield server


@pytest.fixture
def backend(recorded: Recorded) -> Backend:
    """Return a backend that has met the server."""
    backend = new_backend(recorded.program)
    facts = recorded.run("meet", backend.meet)
    assert (facts.dtype, facts.num_gpus, facts.takes_broadcasts) == ("float32", 1, True)
    return backend


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    """Return the models of versions 0 and 1."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    return [Reference(write_model(folder / str(seed), seed=seed, max_position=CONTEXT)) for seed in (SEED, SEED + 1)]


def tokens_asked(exchange: dict[str, Any]) -> list[int]:
    payload = exchange["payload"]
    return next(payload[name] for name in ("input_ids", "token_ids", "prompt") if name in payload)


def parse(recorded: Recorded, backend: Backend, case: str, max_tokens: int = FLIGHT) -> Segment:
    (exchange,) = recorded.of(case)
    assert exchange["status"] == 200
    return backend.parse_segment(recorded.address, exchange["body"], max_tokens)


def gaps(recorded: Recorded, case: str, segment: Segment, reference: Reference) -> torch.Tensor:
    """Return by how much each logprob differs from the reference's."""
    (exchange,) = recorded.of(case)
    asked = tokens_asked(exchange)
    response = ModelResponse(asked, segment.tokens, segment.logprobs, [0] * len(segment.tokens), "length", "")
    scored = reference.score(response)
    return (scored.of_tokens(scored.logprobs_TV()) - torch.tensor(segment.logprobs, dtype=torch.float64)).abs()


@pytest.mark.parametrize("case", ["greedy", "sampled"])
def test_completions_have_the_reference_s_logprobs(
    recorded: Recorded, backend: Backend, references: list[Reference], case: str
) -> None:
    segment = parse(recorded, backend, case)
    assert len(segment.tokens) == len(segment.logprobs) == 16 and segment.finish == "length"
    assert gaps(recorded, case, segment, references[0]).max() < 1e-3


def test_our_requests_are_those_that_were_recorded(recorded: Recorded, backend: Backend) -> None:
    request = requests(1, 16, greedy=True)[0]
    request.input_ids = prompt(3, 12)
    (exchange,) = recorded.of("greedy")
    assert backend.endpoint == exchange["endpoint"]
    assert backend.payload(recorded.address, request, [], 7) == exchange["payload"]


def test_completions_end_at_stop_tokens(recorded: Recorded, backend: Backend) -> None:
    whole = parse(recorded, backend, "greedy")
    stopped = parse(recorded, backend, "stop id")
    stop = whole.tokens[5]
    assert stopped.finish == "stop" and stopped.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
    by_string = parse(recorded, backend, "stop string")
    assert (stopped.matched_stop, by_string.matched_stop) == (None, "g")
    assert by_string.finish == "stop" and by_string.tokens == whole.tokens[: len(by_string.tokens)]
    assert 1 < len(by_string.tokens) < 16
    kept = parse(recorded, backend, "min tokens")
    assert kept.finish == "length" and len(kept.tokens) == 8 and stop not in kept.tokens
    ended = parse(recorded, backend, "end token")
    assert ended.finish == "stop" and ended.tokens[-1] in recorded.end_ids
    assert not set(ended.tokens[:-1]) & set(recorded.end_ids)


def test_logprobs_after_top_k_are_of_the_rest(recorded: Recorded, backend: Backend) -> None:
    whole, only = parse(recorded, backend, "greedy"), parse(recorded, backend, "top_k")
    assert only.tokens == whole.tokens
    assert only.logprobs == pytest.approx([0.0] * 16, abs=1e-4)


def test_logprobs_are_over_the_kept_sets(recorded: Recorded, backend: Backend, references: list[Reference]) -> None:
    if not recorded.of("kept sets"):
        pytest.skip("vLLM returns them on GPUs only")
    segment = parse(recorded, backend, "kept sets")
    (exchange,) = recorded.of("kept sets")
    assert exchange["payload"]["return_sampling_mask"] and segment.kept is not None
    response = ModelResponse(tokens_asked(exchange), segment.tokens, segment.logprobs, [0] * 16, "length", "")
    scored = references[0].score(response)
    for logprobs_V, ids, token, told in zip(scored.logprobs_TV(), segment.kept, segment.tokens, segment.logprobs):
        order = logprobs_V.argsort(descending=True)
        before = logprobs_V[order].exp().cumsum(0)
        assert set(ids) == set(order[: min(20, int((before < 0.9).sum()) + 1)].tolist())
        assert told == pytest.approx((logprobs_V[token] - logprobs_V[ids].logsumexp(0)).item(), abs=1e-4)


def test_an_aborted_completion_keeps_what_was_sampled(
    recorded: Recorded, backend: Backend, references: list[Reference]
) -> None:
    segment = parse(recorded, backend, "aborted")
    assert segment.finish == "abort" and 0 < len(segment.tokens) == len(segment.logprobs) < FLIGHT
    assert gaps(recorded, "aborted", segment, references[0]).max() < 1e-3


def test_versions_split_where_the_weights_changed(
    recorded: Recorded, backend: Backend, references: list[Reference]
) -> None:
    segment = parse(recorded, backend, "split")
    assert segment.versions is not None and segment.finish == "length" and len(segment.tokens) == FLIGHT
    assert segment.versions == sorted(segment.versions) and set(segment.versions) == {1, 2}
    assert gaps(recorded, "split", segment, references[1]).max() < 1e-3, "both versions are the same weights"
    assert set(parse(recorded, backend, "greedy after the update").versions or []) == {1}


def test_an_update_through_the_disk_is_what_the_server_accepted(recorded: Recorded, backend: Backend) -> None:
    calls = recorded.of("update from disk")
    folder = json.dumps([one["payload"] for one in calls]).partition("/models/")[2].partition('"')[0]

    async def update(caller: ServerConnection) -> None:
        await backend.pause(caller)
        assert await backend.load(caller, f"/models/{folder}", 1, {}) == []
        await backend.resume(caller)

    recorded.run("update from disk", update)
    assert recorded.asked == [(one["endpoint"], one["payload"]) for one in calls]


def error_of(recorded: Recorded, case: str) -> StatusError:
    """Let our HTTP client meet the recorded error."""
    (exchange,) = recorded.of(case)
    with pytest.raises(StatusError) as caught:
        recorded.run(case, lambda caller: caller.request("POST", exchange["endpoint"], exchange["payload"]))
    text = str(caught.value)
    assert f"http://{recorded.address}{exchange['endpoint']}" in text and f"status {exchange['status']}" in text
    return caught.value


@pytest.mark.parametrize(
    ("case", "status", "is_overflow", "says"),
    [
        ("overflow", 400, True, "512"),
        ("temperature below 0", 400, False, "temperature"),
        ("unknown endpoint", 404, False, "Not Found"),
        ("update without begin", None, False, "begin"),
    ],
)
def test_errors(
    recorded: Recorded, backend: Backend, case: str, status: int | None, is_overflow: bool, says: str
) -> None:
    error = error_of(recorded, case)
    assert error.status == status or (status is None and error.status in (400, 500))
    assert bool(error.status == 400 and backend.overflow.search(str(error))) is is_overflow
    assert says in str(error) or (case == "update without begin" and "start" in str(error))


def test_a_server_of_another_kind_is_refused(recorded: Recorded) -> None:
    other = new_backend("sglang" if recorded.program == "vllm" else "vllm")
    with pytest.raises(ServerError):
        recorded.run("unknown endpoint", other.meet)
