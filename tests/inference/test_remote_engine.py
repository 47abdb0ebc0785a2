"""Generation over HTTP against real scripted servers: exact whatever happens to them."""

from __future__ import annotations

import asyncio
import math
import resource
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from testing_client import connected, in_background, in_loop, until
from testing_server import EOS, ScriptedServer, kept_at, logprob_at, serve, token_at
from testing_workflows import SamplingWorkflow

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError, ContextOverflowError, EpisodeError, ServerError, UnreachableError
from arealite.api.io_struct import ModelRequest, ModelResponse, PromptId
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.inference import http as server_http
from arealite.inference.backends.lite import LiteBackend
from arealite.inference.backends.sglang import SGLangBackend
from arealite.inference.http import OutOfFilesError, StatusError
from arealite.inference.pool import parse_addresses
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.rollout.event_loop import activity
from arealite.rollout.prompts import Episode, current_episode
from arealite.utils.token_ids import StopStrings

PROMPT = [5, 6, 7]


def generate(engine: RemoteInferenceEngine, rid: str = "a", **gconfig: Any) -> ModelResponse:
    request = ModelRequest(PROMPT, GenerationHyperparameters(**gconfig), rid=rid)
    return asyncio.run(engine.agenerate(request))


def check_exact(response: ModelResponse, seed: int) -> None:
    """Compare with what an uninterrupted server says of that seed."""
    positions = range(len(PROMPT), len(PROMPT) + response.output_len)
    assert response.input_tokens == PROMPT
    assert response.output_tokens == [token_at(seed, position) for position in positions]
    expected = zip(response.output_tokens, positions, response.output_versions, strict=True)
    assert response.output_logprobs == [logprob_at(*one) for one in expected]


def test_a_completion() -> None:
    server = ScriptedServer(version=3)
    with connected(server) as engine:
        response = generate(engine, max_new_tokens=20)
    assert response.stop_reason == "length" and response.output_len == 20
    assert response.output_versions == [3] * 20
    assert response.server == server.address and response.num_interrupts == 0
    check_exact(response, server.requests[0]["sampling_params"]["sampling_seed"])
    assert "rid" not in server.requests[0]
    assert "return_sampling_mask" not in server.requests[0] and response.output_kept is None


def test_parameters_as_the_server_spells_them(tmp_path: Path) -> None:
    tiny_models.tokenizer().save_pretrained(tmp_path)
    server = ScriptedServer()
    with connected(server, tokenizer_path=str(tmp_path)) as engine:
        generate(
            engine, max_new_tokens=4, temperature=0.7, top_p=0.9, top_k=50, min_p=0.1, stop=["\n"], stop_token_ids=[9]
        )
        generate(engine, max_new_tokens=4, greedy=True, min_new_tokens=2)
    first, second = (request["sampling_params"] for request in server.requests)
    assert first.pop("sampling_seed") != second.pop("sampling_seed")
    assert [request.get("return_sampling_mask") for request in server.requests] == [True, None]
    common = {"max_new_tokens": 4}
    assert first == common | {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.1,
        "min_new_tokens": 0,
        "stop": ["\n"],
        "stop_token_ids": [9],
    }
    assert second == common | {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_new_tokens": 2, "stop_token_ids": []}


@settings(max_examples=settings.default.max_examples // 5)
@given(moments=st.lists(st.integers(0, 30), max_size=6), tells=st.sampled_from(["spans", "single"]))
def test_any_interruptions_leave_the_tokens_exact(moments: list[int], tells: Any) -> None:
    """Weights change at random moments, with the requests in flight aborted."""
    server = ScriptedServer(token_delay_s=0.001, tells=tells)
    with connected(server) as engine:
        params = {"max_new_tokens": 40, "min_new_tokens": 30, "top_k": 5}
        with in_background(lambda: generate(engine, **params)) as pending:
            for moment in moments:
                time.sleep(moment / 1000)
                server.abort_all()
                server.version += 1
    response = pending.result()
    assert response.output_len == 40 and response.stop_reason == "length"
    assert response.output_versions == sorted(response.output_versions)
    check_exact(response, server.requests[0]["sampling_params"]["sampling_seed"])
    assert response.output_kept == [kept_at(*one) for one in zip(response.output_tokens, range(len(PROMPT), 99))]
    received = len(PROMPT)
    for request in server.requests:
        assert request["input_ids"] == PROMPT + response.output_tokens[: len(request["input_ids"]) - len(PROMPT)]
        assert len(request["input_ids"]) >= received
        received = len(request["input_ids"])
        params = request["sampling_params"]
        assert params["max_new_tokens"] == 40 - (received - len(PROMPT))
        assert params["min_new_tokens"] == max(0, 30 - (received - len(PROMPT)))
    assert response.num_interrupts == len(server.requests) - 1


def test_narrowed_completions_are_trained_on_only_with_what_they_were_sampled_from() -> None:
    rows = [{"prompt_id": PromptId(0, index), "input_ids": PROMPT} for index in range(2)]
    with connected(ScriptedServer(), consumer_batch_size=2) as engine:
        batch = engine.rollout_batch(rows, SamplingWorkflow(max_new_tokens=6, top_p=0.9, top_k=5))
        assert batch["kept_counts"].tolist() == [[0, 0, 0, *(1 + place % 4 for place in range(3, 9))]] * 2
    for server, narrowed in ((ScriptedServer(returns_kept=False), {"top_k": 5}), (ScriptedServer(), {"top_p": 0.9})):
        with connected(server, consumer_batch_size=2, episode_retries=0, max_failed_share=0.0) as engine:
            workflow = SamplingWorkflow(max_new_tokens=6, **narrowed)
            assert "kept_ids" not in engine.evaluate_batch(rows, workflow), "which trains nothing"
            with pytest.raises(EpisodeError, match=r"must have the keys kept_ids and kept_counts.*Use trajectory_from"):
                engine.rollout_batch(rows, workflow)


@dataclass
class CuttingServer(ScriptedServer):
    """Continues one text token by token, aborts after `lengths` tokens, and looks for stops in its own output only."""

    text: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    async def _sample(self, body: dict[str, Any]) -> dict[str, Any]:
        start = len(body["input_ids"]) - len(PROMPT)
        stops = StopStrings(tiny_models.tokenizer(), body["sampling_params"]["stop"])
        max_tokens = self.lengths.pop(0) if self.lengths else len(self.text)
        tokens: list[int] = []
        finish = {"type": "abort"}
        for token in self.text[start : start + max_tokens]:
            tokens.append(token)
            if stops.matched(tokens) is not None:
                finish = {"type": "stop", "matched": stops.matched(tokens)}
                break
        pairs = [[-float(start + index), token, None] for index, token in enumerate(tokens)]
        meta = {"finish_reason": finish, "output_token_logprobs": pairs, "weight_version": str(len(self.requests))}
        kept = [[token, 100 + start + index] for index, token in enumerate(tokens)]
        meta |= {"output_token_sampling_mask": kept, "output_token_sampling_logprobs": [pair[0] / 2 for pair in pairs]}
        return {"output_ids": tokens, "meta_info": meta}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 4), max_size=8))
def test_a_stop_string_is_found_wherever_interruptions_fall(tmp_path: Path, lengths: list[int]) -> None:
    """`anab` begins several times before it is whole."""
    tokenizer = tiny_models.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    text = [tiny_models.TEXT_VOCAB.index(letter) for letter in "bananxanabxyz"]
    server = CuttingServer(text=text, lengths=lengths)
    with connected(server, tokenizer_path=str(tmp_path)) as engine:
        response = generate(engine, max_new_tokens=50, stop=["anab"], top_k=2)
    end = "bananxanab"
    assert tokenizer.decode(response.output_tokens) == end
    assert (response.stop_reason, response.matched_stop) == ("stop", "anab")
    assert response.output_logprobs == [-index / 2 for index in range(len(end))], "those over the kept sets"
    assert response.output_kept == [[text[index], 100 + index] for index in range(len(end))]
    assert len(response.output_versions) == len(end)
    assert response.num_interrupts == len(server.requests) - 1


def test_versions_may_change_within_one_reply() -> None:
    server = ScriptedServer(holds_at=10)
    with connected(server) as engine:
        with in_background(lambda: generate(engine, max_new_tokens=20)) as pending:
            server.wait_until_held()
            server.version, server.holds_at = 1, None
        response = pending.result()
    versions = response.output_versions
    assert set(versions) == {0, 1} and versions == sorted(versions) and response.num_interrupts == 0


def test_stop_and_context_end_a_completion() -> None:
    with connected(ScriptedServer(eos_every=5)) as engine:
        stopped = generate(engine, max_new_tokens=500)
        assert stopped.stop_reason == "stop" and stopped.output_tokens[-1] == EOS
    server = ScriptedServer(context=10)
    with connected(server) as engine:
        cut = generate(engine, max_new_tokens=500)
        assert cut.stop_reason == "length" and cut.output_len == 7 and len(server.requests) == 1


@pytest.mark.parametrize(
    "failures", [[500, 503], ["hang up", 500], ["hang up", "hang up"], ["truncated", "nan"], ["nan", 500]]
)
def test_failures_of_a_server_are_repaired(failures: list[int | str]) -> None:
    server = ScriptedServer(failures=failures)
    with connected(server) as engine:
        response = generate(engine, max_new_tokens=8)
    assert response.output_len == 8 and len(server.requests) == 3
    check_exact(response, server.requests[0]["sampling_params"]["sampling_seed"])


def test_a_failure_keeps_the_tokens_already_received() -> None:
    server = ScriptedServer(holds_at=10)
    with connected(server) as engine, in_background(lambda: generate(engine, max_new_tokens=20)) as pending:
        server.wait_until_held()
        server.failures = [500]
        server.abort_all()
        server.holds_at = None
    check_exact(pending.result(), server.requests[0]["sampling_params"]["sampling_seed"])
    assert len(server.requests) == 3
    assert len(server.requests[1]["input_ids"]) == len(server.requests[2]["input_ids"]) > len(PROMPT)


def test_a_connection_is_not_used_when_the_server_may_be_closing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a request would be lost, and a server that loses that of a pause would miss the weights."""

    class Listing(ScriptedServer):
        """Keeps the connections of its requests."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.connections: list[Any] = []

        @web.middleware
        async def _refuse(self, request: web.Request, handler: Any) -> web.StreamResponse:
            if request.path == "/generate":
                self.connections.append(request.transport)
            return await super()._refuse(request, handler)

    assert server_http._IDLE_S < 5
    monkeypatch.setattr(server_http, "_IDLE_S", 0.2)
    server = Listing()
    with connected(server) as engine:
        for _ in range(3):
            generate(engine, max_new_tokens=2)
            time.sleep(0.4)
    assert len(set(server.connections)) == len(server.connections) == 3


@pytest.mark.parametrize(
    ("failure", "error_type", "message"),
    [
        ("hang up", UnreachableError, "/generate must reach a server: got"),
        ("truncated", ServerError, r"/generate must answer with JSON: got status 200 and \d+ bytes, unexpected end"),
        ("nan", ServerError, r"/generate must answer with JSON: .*\[\[?NaN"),
        ("slow", ServerError, r"/generate must answer within 0\.(3|2\d+) s: got no answer"),
        (502, StatusError, "/generate must succeed: got status 502: .*scripted"),
    ],
)
def test_what_goes_wrong_to_the_end_says_what_it_was(
    failure: int | str, error_type: type[ServerError], message: str
) -> None:
    server = ScriptedServer(failures=[failure] * 10)
    with connected(server, request_retries=1, request_timeout=0.3 if failure == "slow" else 60.0) as engine:
        with pytest.raises(ServerError, match=rf"{server.address}{message}") as caught:
            generate(engine, max_new_tokens=1)
        assert len(server.requests) == 2
    assert type(caught.value) is error_type


def test_a_server_whose_answers_are_bad_is_avoided_though_it_is_healthy() -> None:
    """Its /health is fine, so it is readmitted at once; still no request of ours is lost to it."""
    bad, good = ScriptedServer(failures=["nan"] * 100), ScriptedServer()
    with connected(bad, good, request_retries=1) as engine:
        for index in range(6):
            response = generate(engine, rid=str(index), max_new_tokens=3)
            assert response.server == good.address
    check_exact(response, good.requests[-1]["sampling_params"]["sampling_seed"])
    assert 1 <= len(bad.requests) <= 6


def test_a_prompt_that_leaves_no_room_is_not_repeated() -> None:
    server = ScriptedServer(context=3)
    with connected(server) as engine:
        with pytest.raises(ContextOverflowError, match=r"got 3 tokens .*longer than the model's context length"):
            generate(engine, max_new_tokens=8)
        assert len(server.requests) == 1


def test_the_embedded_server_says_the_same_of_a_long_prompt() -> None:
    texts = (
        "input_ids must hold 1 to 127 tokens: got 128. Shorten the prompt or serve with a larger context.",
        "Requested token count exceeds the model's maximum context length of 128 tokens.",
        "Input length (130) exceeds the maximum allowed length (128).",
    )
    assert all(LiteBackend.overflow.search(text) for text in texts)
    assert not LiteBackend.overflow.search("top_p must be positive")


def test_completions_are_on_record_in_their_episode() -> None:
    server = ScriptedServer(token_delay_s=0.01, holds_at=10)
    episodes: list[Episode] = []

    class Recording(SamplingWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict | None:
            episode = current_episode.get()
            assert episode is not None
            episodes.append(episode)
            return await super().arun_episode(engine, data)

    with connected(server) as engine:

        def interrupt() -> None:
            server.wait_until_held(2)
            server.abort_all()
            server.holds_at = None

        row = {"input_ids": PROMPT, "prompt_id": PromptId(0, 0)}
        with in_background(interrupt):
            engine.rollout_batch([row], Recording(n_samples=2, max_new_tokens=20))
    (episode,) = episodes
    assert sorted(one.sample for one in episode.samples) == [0, 1]
    assert {(one.tokens, one.num_interrupts, one.server) for one in episode.samples} == {(20, 1, server.address)}
    assert all(0.2 <= one.latency_s < 120 for one in episode.samples)


def test_an_episode_that_waits_for_a_server_says_so() -> None:
    found: list[dict[str, Any]] = []
    server = ScriptedServer(holds_at=5)

    def look() -> None:
        server.wait_until_held()
        found.extend(activity.oldest())
        server.holds_at = None

    with connected(server) as engine, in_background(look):
        engine.rollout_batch([{"input_ids": PROMPT, "prompt_id": PromptId(0, 4)}], SamplingWorkflow(max_new_tokens=10))
    assert [(one["name"], one["on"]) for one in found] == [("0-4", "servers")]


def test_a_request_does_not_wait_for_ever_for_the_end_of_a_publication(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arealite.inference.completions._RESUME_GRACE_S", 0.1)
    with connected(ScriptedServer(), weight_update_timeout=0.2) as engine:
        engine._completions.may_generate.clear()
        with pytest.raises(ServerError, match=r"must resume within 0\.7 s"):
            generate(engine, max_new_tokens=2)


def test_a_server_that_only_aborts_does_not_keep_a_request_for_ever() -> None:
    server = ScriptedServer(holds_at=0)
    with connected(server, request_timeout=1.0) as engine:
        is_over = threading.Event()

        def abort() -> None:
            while not is_over.wait(0.01):
                server.abort_all()

        refused = pytest.raises(ServerError, match=r"must sample a token within 1 s: got \d+ empty aborts in a row")
        with in_background(abort), refused:
            try:
                generate(engine, max_new_tokens=2)
            finally:
                is_over.set()


def test_a_bad_request_is_not_repeated() -> None:
    server = ScriptedServer(failures=[400])
    with connected(server) as engine:
        with pytest.raises(ServerError, match="got status 400"):
            generate(engine, max_new_tokens=8)
        assert len(server.requests) == 1


def test_another_server_takes_over_and_the_first_is_readmitted() -> None:
    first, second = ScriptedServer(), ScriptedServer()
    with connected(first, second) as engine:
        assert generate(engine, rid="x", max_new_tokens=2).server == first.address
        first.failures, first.is_healthy = ["hang up"], False
        assert generate(engine, rid="x", max_new_tokens=2).server == second.address
        for index in range(4):
            assert generate(engine, rid=f"y{index}", max_new_tokens=2).server == second.address
        first.is_healthy = True
        until(lambda: all(server.state != "removed" for server in engine.servers.servers))
        assert generate(engine, rid="z", max_new_tokens=2).server == first.address


def test_a_server_that_tells_no_version_is_believed_unless_weights_moved_meanwhile() -> None:
    server = ScriptedServer(tells="nothing")
    with connected(server) as engine:
        in_loop(engine, lambda: engine.servers.advance(engine.servers.servers, 4))
        assert generate(engine, max_new_tokens=2).output_versions == [4, 4]
        server.holds_at = 8
        with in_background(lambda: generate(engine, max_new_tokens=10)) as pending:
            server.wait_until_held()
            in_loop(engine, lambda: engine.servers.advance(engine.servers.servers, 5))
            server.holds_at = None
    assert pending.result().output_versions == [5] * 10
    assert len(server.requests) == 3, "the reply that spans the change is asked for again"


def test_a_client_without_files_accuses_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_http, "_IDLE_S", 0.05)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connected(ScriptedServer(), request_retries=1) as engine:
        time.sleep(0.5)  # the connection that initialized it is not used again
        request = ModelRequest([5, 6, 7], GenerationHyperparameters(max_new_tokens=1))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(OutOfFilesError, match=r"too many open files.*Raise `ulimit -n`"):
                engine._require_executor().loop.run(engine.agenerate(request))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [one.state for one in engine.servers.servers] == ["serving"]
        assert generate(engine, max_new_tokens=1).output_len == 1


def test_a_server_that_forgets_versions_is_not_believed() -> None:
    """It has started anew, with the weights of its start."""
    server = ScriptedServer(version=3)
    with connected(server) as engine:
        engine.config.setup_timeout = 0.3
        in_loop(engine, lambda: engine.servers.advance(engine.servers.servers, 3))
        assert generate(engine, max_new_tokens=2).output_versions == [3, 3]
        server.tells = "nothing"
        with pytest.raises(ServerError, match=f"weights of version 3 .* got {server.address} with unknown weights"):
            generate(engine, max_new_tokens=2)


def masked(kept: list[Any]) -> dict[str, Any]:
    return {"output_token_sampling_mask": kept, "output_token_sampling_logprobs": [-1.0, -2.0]}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"output_ids": [1, 2.5]}, "list of ints"),
        ({"output_ids": [1]}, "one per token"),
        ({"output_ids": [1, 4]}, "its own tokens"),
        ({"meta_info": None}, "the fields of SGLang"),
        ({"finish_reason": {"type": "exploded"}}, "finish_reason"),
        ({"output_token_logprobs": [[-1.0, 1, None], [math.nan, 2, None]]}, "finite"),
        ({"output_token_logprobs": [[-1.0, 1, None], [0.01, 2, None]]}, "at most 0"),
        ({"output_token_logprobs": [[-1.0, 1, None], [None, 2, None]]}, "finite"),
        ({"weight_versions": [{"version": "1", "start": 0, "end": 1}]}, "versions for its 2 tokens"),
        ({"weight_versions": [{"version": "1", "start": 1, "end": 2}]}, "contiguous"),
        ({"weight_versions": [{"version": "v1", "start": 0, "end": 2}]}, "integer versions"),
        ({"output_token_sampling_mask": [[1], [2]]}, "the fields of SGLang"),
        (masked([[1]]), "the kept ids of its 2 tokens"),
        (masked([[1], [3, 4]]), "each token among those that it was sampled from"),
        (masked([[1], []]), "each token among those that it was sampled from"),
        (masked([[1], [2, -1]]), "kept ids that are ints of at least 0"),
        (masked([[1], [2, "3"]]), "kept ids that are ints of at least 0"),
        (masked([[1], 2]), "the fields of SGLang"),
        ({"output_ids": [1, -2], "output_token_logprobs": [[-1.0, 1, None], [-1.0, -2, None]]}, "tokens of at least 0"),
        ({"weight_versions": [{"version": "1", "start": 0, "end": 10**12}]}, "contiguous"),  # not a list of a terabyte
        ({"weight_versions": [{"version": "1", "start": 0, "end": "2"}]}, "the fields of SGLang"),
    ],
)
def test_malformed_replies_are_refused(change: dict[str, Any], rule: str) -> None:
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-1.0, 1, None], [-2.0, 2, None]],
        "weight_version": "3",
    }
    reply: dict[str, Any] = {"output_ids": [1, 2], "meta_info": meta}
    parse_segment = SGLangBackend(pause_mode="abort").parse_segment
    assert parse_segment("s:1", reply, 2).versions == [3, 3]
    with pytest.raises(ServerError, match="at most 1 tokens"):
        parse_segment("s:1", reply, 1)
    for key, value in change.items():
        (reply if key in reply else meta)[key] = value
    with pytest.raises(ServerError, match=rf"s:1/generate must .*{rule}"):
        parse_segment("s:1", reply, 2)


def test_wrong_requests() -> None:
    with connected(ScriptedServer()) as engine:
        with pytest.raises(ValueError, match="n_samples must be 1"):
            generate(engine, n_samples=2)
        with pytest.raises(ValueError, match="input_ids must have"):
            asyncio.run(engine.agenerate(ModelRequest([], GenerationHyperparameters())))


# Episodes


def test_a_group_is_reproducible_and_stays_on_one_server() -> None:
    workflow = SamplingWorkflow(n_samples=4, max_new_tokens=6)
    data = [{"input_ids": PROMPT, "prompt_id": PromptId(0, index)} for index in range(6)]
    batches = []
    for _ in range(2):
        servers = ScriptedServer(), ScriptedServer()
        with connected(*servers, consumer_batch_size=6, seed=7) as engine:
            batches.append(engine.rollout_batch(data, workflow))
            assert [len(server.requests) % 4 for server in servers] == [0, 0]
            assert all(len(server.requests) == 12 for server in servers)
    assert torch.equal(batches[0]["input_ids"], batches[1]["input_ids"])
    assert len({tuple(row) for row in batches[0]["input_ids"].tolist()}) == 24, "every sample has a seed of its own"


def test_evaluation() -> None:
    server = ScriptedServer(eos_every=4, version=9)
    with connected(server, consumer_batch_size=4) as engine:
        engine.set_version(10**12)  # as scripts do that keep a second engine for evaluation
        result = engine.evaluate_batch(
            [{"input_ids": PROMPT} for _ in range(20)], SamplingWorkflow(n_samples=2, max_new_tokens=4)
        )
    outputs = []
    for request in server.requests:
        seed = request["sampling_params"]["sampling_seed"]
        stream = [token_at(seed, len(PROMPT) + index, eos_every=4) for index in range(4)]
        outputs.append(stream[: stream.index(EOS) + 1] if EOS in stream else stream)
    assert result["num_samples"] == 40 and result["num_failed"] == 0
    assert result["completion_tokens"] == pytest.approx(sum(map(len, outputs)) / 40)
    assert result["reward"] == pytest.approx(sum(one[0] for one in outputs) / 40)
    assert result["reward_low"] < result["reward"] < result["reward_high"] and "accuracy" not in result
    assert result["truncated_ratio"] == pytest.approx(sum(one[-1] != EOS for one in outputs) / 40)


# Set-up


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, serve(ScriptedServer()) as server:
        missing = f"127.0.0.1:{silent.getsockname()[1]}"
        engine = RemoteSGLangEngine(InferenceEngineConfig(server_addrs=[server.address, missing], setup_timeout=2.0))
        with pytest.raises(ServerError, match=f"within 2 s: got no answer from {missing}\\."):
            engine.initialize(None, None)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("arealite")]


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_addresses("a:1, http://b:2/ ,") == parse_addresses(["a:1", "http://b:2"]) == ["a:1", "b:2"]
    for wrong in ("a", "a:0", "a:99999", "a:1/v1", "u@a:1", "[::1:1", "https://a:1"):
        with pytest.raises(ConfigError, match="must be host:port"):
            parse_addresses(f"a:1,{wrong}")
    monkeypatch.delenv("AREAL_LLM_SERVER_ADDRS", raising=False)
    with pytest.raises(ConfigError, match="AREAL_LLM_SERVER_ADDRS must name servers"):
        RemoteSGLangEngine(InferenceEngineConfig()).initialize(None, None)
    with serve(ScriptedServer()) as server:
        monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", server.address)
        engine = RemoteSGLangEngine(InferenceEngineConfig())
        engine.initialize(None, None)
        assert generate(engine, max_new_tokens=2).server == server.address
        engine.destroy()


def test_other_ranks_are_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    engine = RemoteSGLangEngine(InferenceEngineConfig())
    engine.initialize(None, None)
    engine.set_version(3)
    engine.pause()
    engine.resume()
    assert engine.get_version() == 3 and engine.metrics() == {}
    with pytest.raises(RuntimeError, match="got rank 1"):
        engine.submit({}, SamplingWorkflow())
    engine.destroy()


def test_destroy_is_quick_with_requests_in_flight_and_may_come_twice() -> None:
    server = ScriptedServer(token_delay_s=1.0)
    with connected(server, consumer_batch_size=8) as engine:
        for _ in range(8):
            engine.submit({"input_ids": PROMPT}, SamplingWorkflow(max_new_tokens=1000))
        with pytest.raises(TimeoutError):
            engine.wait(1, timeout=0.3)
        began = time.monotonic()
        engine.destroy()
        assert time.monotonic() - began < 120, "a request takes 1000 s"
        engine.destroy()
