"""What clients find out about servers when they meet them, and refuse before a request is sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from testing_client import connected, in_background
from testing_server import ScriptedServer
from testing_vllm import ScriptedVLLM
from tiny_models import VOCAB_SIZE, save_qwen3

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.errors import ConfigError, ServerError, WeightUpdateError
from arealite.api.io_struct import ModelRequest, ModelResponse, ParamSpec, WeightUpdateMeta
from arealite.api.servers import KINDS
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.engine.vllm_remote import RemoteVLLMEngine
from arealite.inference.backends import BACKENDS
from arealite.inference.backends.vllm import VLLMBackend
from arealite.inference.remote_engine import RemoteInferenceEngine


def meet(server: Any, **config: Any) -> None:
    with connected(server, **config):
        pass


def generate(engine: RemoteInferenceEngine, input_ids: list[int], **gconfig: Any) -> ModelResponse:
    return asyncio.run(engine.agenerate(ModelRequest(input_ids, GenerationHyperparameters(**gconfig))))


def vllm(**options: Any) -> ScriptedVLLM:
    """Return one as others start it."""
    return ScriptedVLLM(backend=None, options={"prefix_caching": True, **options})


def test_every_name_that_a_config_takes_is_a_kind_of_server() -> None:
    assert set(KINDS) == set(BACKENDS) and all(kind.name == name for name, kind in KINDS.items())


def test_a_server_of_another_kind_is_refused() -> None:
    with pytest.raises(ServerError, match=r"must describe itself as SGLang.*404.*backend"):
        meet(vllm())
    with pytest.raises(ServerError, match=r"must describe itself as vLLM.*404"):
        meet(ScriptedServer(), backend="vllm")
    for missing in ("/pause", "/inference/v1/generate"):
        with pytest.raises(ServerError, match=f"DEV_MODE=1 and --enable-scale-out: it has no {missing}"):
            meet(ScriptedVLLM(lacks=missing), backend="vllm")


def test_a_prefix_cache_of_old_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="--disable-radix-cache"):
        meet(ScriptedServer(), pause_mode="in_place")
    meet(ScriptedServer(info={"disable_radix_cache": True}), pause_mode="in_place")
    with pytest.raises(ConfigError, match="--no-enable-prefix-caching"):
        meet(vllm(), backend="vllm", pause_mode="in_place")
    meet(vllm(prefix_caching=False), backend="vllm", pause_mode="in_place")


def test_a_vllm_with_logprobs_of_another_distribution_is_refused() -> None:
    """They are those at temperature 1, whatever is sampled from, unless it is started otherwise."""
    with pytest.raises(ConfigError, match=r"got raw_logprobs at .*--logprobs-mode processed_logprobs"):
        meet(vllm(logprobs_mode="raw_logprobs"), backend="vllm")


def test_a_continuation_by_vllm_does_not_draw_the_same_random_numbers_again() -> None:
    """vLLM seeds a generator when a request begins; SGLang and lite hash the seed with the position."""
    request = ModelRequest([5, 6], GenerationHyperparameters(max_new_tokens=8))
    backend = VLLMBackend(pause_mode="abort")
    payloads = [backend.payload("h:1", request, [7] * done, 2**63 - 1) for done in range(3)]
    assert [one["sampling_params"]["seed"] for one in payloads] == [2**63 - 1, 0, 1]


def test_named_engines_take_only_their_own_servers() -> None:
    with pytest.raises(ConfigError, match="sglang or lite for RemoteSGLangEngine: got vllm"):
        RemoteSGLangEngine(InferenceEngineConfig(backend="vllm"))
    with pytest.raises(ConfigError, match="vllm for RemoteVLLMEngine: got sglang"):
        RemoteVLLMEngine(InferenceEngineConfig(backend="sglang"))


def test_token_limits_fit_into_the_context() -> None:
    """SGLang refuses a request whose prompt and token limit exceed its context together, though the prompt fits."""
    server = ScriptedServer(info={"max_req_input_len": 10}, context=16)
    with connected(server) as engine:
        assert generate(engine, [5] * 9, max_new_tokens=100).output_len == 7
        assert generate(engine, [5] * 9, max_new_tokens=3).output_len == 3
        assert generate(engine, [5] * 9, max_new_tokens=100, min_new_tokens=50).output_len == 7
    assert [one["sampling_params"]["max_new_tokens"] for one in server.requests] == [7, 3, 7]
    assert [one["sampling_params"]["min_new_tokens"] for one in server.requests] == [0, 0, 7]


def test_a_completion_that_is_interrupted_where_the_context_ends_is_kept() -> None:
    """SGLang takes no prompt as long as what it had already sampled."""
    server = ScriptedServer(info={"max_req_input_len": 10}, context=16, holds_at=12)

    with connected(server) as engine, in_background(lambda: generate(engine, [5] * 9, max_new_tokens=100)) as pending:
        server.wait_until_held()
        server.context = 10
        server.abort_all()
        response = pending.result()
    assert response.stop_reason == "length" and response.num_interrupts == 1
    assert 1 <= response.output_len == len(response.output_logprobs) == len(response.output_versions) < 7
    assert len(server.requests) == 2


def test_tokens_that_the_model_does_not_have_are_not_sent(tmp_path: Path) -> None:
    """They would kill an SGLang server."""
    server = ScriptedServer()
    with connected(server, tokenizer_path=save_qwen3(tmp_path / "model", seed=1)) as engine:
        for bad in (-1, VOCAB_SIZE):
            with pytest.raises(ValueError, match=rf"from 0 to {VOCAB_SIZE - 1}: got {bad}\."):
                generate(engine, [5, bad], max_new_tokens=2)
        assert generate(engine, [0, VOCAB_SIZE - 1], max_new_tokens=2).output_len == 2
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("server", "backend", "dtype"),
    [
        (ScriptedServer(info={"dtype": "bfloat16"}), "sglang", "bfloat16"),
        (ScriptedServer(info={"dtype": "auto"}), "sglang", None),
        (ScriptedServer(info={"dtype": "float32"}), "lite", "float32"),
        (vllm(), "vllm", "float32"),
    ],
)
def test_servers_tell_the_dtype_that_bounds_their_canaries(server: Any, backend: str, dtype: str | None) -> None:
    with connected(server, backend=backend) as engine:
        assert [one.facts.dtype for one in engine.servers.servers] == [dtype]


def test_a_proxy_whose_server_still_starts_is_waited_for() -> None:
    class Proxied(ScriptedServer):
        @web.middleware
        async def _refuse(self, request: web.Request, handler: Any) -> web.StreamResponse:
            self.num_calls = getattr(self, "num_calls", 0) + 1
            if self.num_calls < 3:
                return web.Response(status=502)
            return await super()._refuse(request, handler)

    meet(Proxied(), setup_timeout=5)


def test_a_server_that_was_left_paused_is_let_go_on() -> None:
    """SGLang does not even answer /health while it is paused."""

    class Paused(ScriptedServer):
        async def _health(self, request: web.Request) -> web.Response:
            await self._resumed.wait()
            return await super()._health(request)

        def app(self) -> web.Application:
            app = super().app()
            self._resumed.clear()
            return app

    with connected(Paused(), setup_timeout=5) as engine:
        assert generate(engine, [5, 6], max_new_tokens=3).output_len == 3


def test_a_stock_vllm_takes_no_broadcast_and_says_so_at_once() -> None:
    with connected(ScriptedVLLM(backend=None), backend="vllm") as engine:
        meta = WeightUpdateMeta("nccl", nccl_param_specs=[[ParamSpec("a", (2,), "float32")]], version=1)
        with pytest.raises(WeightUpdateError, match=r"take weights by broadcast: .*weight_update=disk"):
            engine.update_weights(meta)
        assert generate(engine, [5, 6], max_new_tokens=3).output_len == 3, "it goes on with its weights"


def test_taking_over_a_vllm_ends_the_update_that_a_run_before_has_left() -> None:
    server = ScriptedVLLM()
    with connected(server, backend="vllm"):
        assert server.calls == ["abandon_weight_update", "/resume"]


@pytest.mark.parametrize(
    ("backend", "is_deterministic", "sends"), [("sglang", True, True), ("sglang", False, False), ("lite", False, True)]
)
def test_seeds_are_sent_to_servers_that_sample_by_them(backend: str, is_deterministic: bool, sends: bool) -> None:
    """Others ignore a seed without a word, and those before SGLang 0.5 refuse it."""
    server = ScriptedServer(info={"enable_deterministic_inference": is_deterministic})
    with connected(server, backend=backend) as engine:
        generate(engine, [5, 6], max_new_tokens=3)
    assert ("sampling_seed" in server.requests[0]["sampling_params"]) == sends
