"""The scripted server of `testing_server`, in vLLM's words: requests and replies have the shapes of vLLM 0.32."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from testing_server import ScriptedServer, kept_at

from arealite.utils.fingerprint import differing, fingerprints
from arealite.utils.weight_transfer import are_of_one_update

GENERATE = "/inference/v1/generate"


def vllm_config(
    *,
    prefix_caching: bool = False,
    logprobs_mode: str = "processed_logprobs",
    backend: str | None = "arealite",
    has_mask_flag: bool = False,
) -> dict[str, Any]:
    """Return what vLLM says of its configuration, as far as a client reads it."""
    return {
        "model_config": {
            "dtype": "torch.float32",
            "logprobs_mode": logprobs_mode,
            "return_sampling_mask": has_mask_flag,
        },
        "cache_config": {"enable_prefix_caching": prefix_caching},
        "parallel_config": {"world_size": 1, "data_parallel_size": 1},
        "weight_transfer_config": None if backend is None else {"backend": backend},
    }


@dataclass
class ScriptedVLLM(ScriptedServer):
    """Tokens are the same function of seed and position; only the protocol differs."""

    has_mask_flag: bool = False
    """Whether it was started with --return-sampling-mask."""
    can_reset_cache: bool = True
    has_started_anew: bool = False
    """And says `default` where it said a version."""
    backend: str | None = "arealite"
    """Of its weight transfer; None is a stock server."""
    options: dict[str, Any] = field(default_factory=dict)
    """What it says of itself beside that: arguments of `vllm_config`."""
    lacks: str = ""
    """An endpoint that it does not have."""
    damaged: set[str] = field(default_factory=set)
    """Tensors that arrive otherwise than they were sent."""

    def app(self) -> web.Application:
        scripted = super().app()
        app = web.Application(middlewares=scripted.middlewares)
        paths = {GENERATE, "/pause"} - {self.lacks}

        async def openapi(_: web.Request) -> web.Response:
            return web.json_response({"paths": {path: {} for path in paths}})

        async def server_info(_: web.Request) -> web.Response:
            told = vllm_config(backend=self.backend, has_mask_flag=self.has_mask_flag, **self.options)
            return web.json_response({"vllm_config": told})

        app.router.add_get("/health", self._health)
        app.router.add_get("/openapi.json", openapi)
        app.router.add_get("/server_info", server_info)
        for endpoint, handle in (
            (GENERATE, self._answer),
            ("/pause", self._pause),
            ("/sleep", self._sleep),
            ("/wake_up", self._wake_up),
            ("/resume", self._continue),
            ("/init_weight_transfer_engine", self._join_group),
            ("/shutdown_weight_transfer_engine", self._leave_group),
            ("/start_weight_update", self._begin),
            ("/update_weights", self._bucket),
            ("/finish_weight_update", self._finish),
            ("/update_weight_version", self._set_version),
            ("/reset_prefix_cache", self._reset_cache),
            ("/collective_rpc", self._call_workers),
        ):
            app.router.add_post(endpoint, handle)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        await self._resumed.wait()
        self._needs("weights", "kv_cache")
        sampling, prompt = body["sampling_params"], body["token_ids"]
        if len(prompt) >= self.context:
            text = f"This model's maximum context length is {self.context} tokens. However, you requested {len(prompt)}"
            return web.json_response({"error": {"message": text, "code": 400}}, status=400)
        ours = {"sampling_seed": sampling["seed"], "max_new_tokens": sampling["max_tokens"], "min_new_tokens": 0}
        reply = await self._sample({"input_ids": prompt, "sampling_params": ours})
        meta, tokens = reply["meta_info"], reply["output_ids"]
        logprobs = [pair[0] for pair in meta["output_token_logprobs"]]
        choice: dict[str, Any] = {"token_ids": tokens, "finish_reason": meta["finish_reason"]["type"]}
        content = [{"token_id": token, "logprob": value} for token, value in zip(tokens, logprobs)]
        spans = [one | {"version": "default"} if self.has_started_anew else one for one in meta["weight_versions"]]
        choice |= {"logprobs": {"content": content}, "weight_versions": spans, "sampling_mask": None}
        if self.has_mask_flag:
            assert sampling["temperature"] > 0 and sampling["top_k"] > 0, "it refuses others"
            choice["sampling_mask"] = [kept_at(*one) for one in zip(tokens, range(len(prompt), self.context))]
        return web.json_response({"choices": [choice]})

    async def _pause(self, request: web.Request) -> web.Response:
        self.calls[-1] = request.path_qs
        self._resumed.clear()
        self.is_paused = True
        if request.query["mode"] == "abort":
            self.abort_all()
        return web.json_response({"status": "paused"})

    async def _sleep(self, request: web.Request) -> web.Response:
        self.calls[-1] = request.path_qs
        if self.asleep:
            self._die(f"it gives back what {self.asleep} left")
        self._resumed.clear()
        self.is_paused = True
        self.abort_all()
        self.asleep = {"weights", "kv_cache"}
        return web.json_response({"status": "sleeping", "level": 2})

    async def _wake_up(self, request: web.Request) -> web.Response:
        self.calls[-1] = request.path_qs
        self.asleep -= {request.query["tags"]}
        if not self.asleep:
            await self._continue(request)
        return web.json_response({"status": "sleeping" if self.asleep else "awake"})

    async def _join_group(self, request: web.Request) -> web.Response:
        info = (await request.json())["init_info"]
        if not are_of_one_update(info["group_name"], *self._groups):
            self._groups.clear()
        return await self._join(_Read(request, info))

    async def _leave_group(self, request: web.Request) -> web.Response:
        for name in list(self._groups):
            await self._leave(_Read(request, {"group_name": name}))
        return web.json_response({})

    async def _bucket(self, request: web.Request) -> web.Response:
        body = (await request.json())["update_info"] | {"weight_version": None}
        return await self._stage(_Read(request, body))

    async def _finish(self, request: web.Request) -> web.Response:
        self._staged_version = int((await request.json())["weight_version"])
        return await self._end(request)

    async def _set_version(self, request: web.Request) -> web.Response:
        self.version = int((await request.json())["new_version"])
        return web.json_response({"success": True})

    async def _reset_cache(self, _: web.Request) -> web.Response:
        return web.json_response({"success": self.can_reset_cache})

    async def _call_workers(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls[-1] = body["method"]
        result: Any = None
        if body["method"] == "mismatched_weights":
            assert self._staged is not None
            arrived = {name: one + 1 if name in self.damaged else one for name, one in self._staged.items()}
            result = differing(fingerprints(arrived), body["kwargs"]["fingerprints"])
        elif body["method"] == "reload_weights":
            self._needs("weights")
            with open(f"{body['kwargs']['weights_path']}/weights") as file:
                self.weights = {"disk": file.read()}
        else:
            self._staged = None
        return web.json_response({"results": [result]})


class _Read:
    """A request whose JSON is ours."""

    def __init__(self, request: web.Request, body: dict[str, Any]) -> None:
        self._body = body
        self.path = request.path

    async def json(self) -> dict[str, Any]:
        return self._body
