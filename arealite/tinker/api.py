"""The API that the Tinker SDK speaks, over HTTP: sessions, futures, models, checkpoints and samplers.

A request for work is answered at once with the id of a future. Invariants: work on a model runs in the order in which
it arrived; a request that is sent again (by the same `seq_id`) runs once; all tokens of a sample come from the weights
of its sampler. Status: 401 without the key, 404 for what this server does not know or have, 422 for a request that must
be changed.
"""

import asyncio
import hmac
import logging
import queue
import shutil
import time
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from aiohttp import web
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from pydantic import BaseModel
from tinker import types
from tinker.proto import tinker_public_pb2 as proto

from arealite.api.cli_args import OnlineConfig
from arealite.api.io_struct import ModelRequest
from arealite.rollout.event_loop import EventLoopThread
from arealite.tinker import wire
from arealite.tinker.losses import inputs_of
from arealite.tinker.models import Models, Settings
from arealite.tinker.sampler import BASE, Sampler, sampling_of
from arealite.utils.http_server import HttpServer

logger = logging.getLogger("arealite.tinker")
Body = dict[str, Any]
_Name = tuple[object, ...]

KEY = "tml-"
"""Begins the key of a server, as the SDK wants; the run's secret follows."""
MAX_BODY_BYTES = 64 * 2**20
_POLL_S = 30.0  # of a request for a result; the SDK gives up after 45 s
_NUM_FUTURES = 4096  # that are remembered
_SESSION_S = 600.0  # without a heartbeat, which comes every 10 s, until the models of a session are forgotten
_MAX_SAMPLES = 1024  # of a prompt
_NUM_UNNAMED = 16  # checkpoints of samplers without a name, per model
_ABSENT = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")
_CLOSE_S = 5.0


class _UnknownError(LookupError):
    """A request names what this server does not know."""


class Command(NamedTuple):
    """A call of a method of `Models`, and its result to be."""

    method: str
    arguments: dict[str, Any]
    outcome: Future[Any]


@dataclass
class _Model:
    settings: Settings
    session: str
    num_steps: int = 0
    loss: float = 0.0  # since the last step


class TinkerApi:
    """Serves until closed. Whoever gets the `commands` runs them in order."""

    def __init__(self, config: OnlineConfig, models: Models, key: str, commands: queue.SimpleQueue[Command]) -> None:
        self._engine, self._key, self._commands = models, key, commands
        self._sampler = Sampler(models.rollout, self._run)
        self._sessions: dict[str, float] = {}  # when it was last heard of
        self._models: dict[str, _Model] = {}
        self._samplers: dict[str, str] = {}  # path of the checkpoint
        self._unnamed: defaultdict[str, deque[str]] = defaultdict(deque)  # paths, by model
        self._futures: OrderedDict[str, tuple[_Name, asyncio.Task[Any]]] = OrderedDict()  # with the request's name
        self._ids: dict[_Name, str] = {}  # futures by what asked for them
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._answer])
        for path, kind, handle in self._endpoints():
            app.router.add_route("*", f"/api/v1/{path}", _parsed(kind, handle))
        app.router.add_post("/api/v1/forward_backward", self._forward_backward)
        app.router.add_post("/api/v1/retrieve_future", self._retrieve)
        self._server = HttpServer(app, None)  # requests are checked for the key below
        self._loop = EventLoopThread("arealite-tinker", what="loop of the Tinker API")
        self._loop.closers.append(self._server.close)
        self.port = self._loop.run(self._server.start(config.host, config.port))

    def close(self) -> None:
        self._loop.close(_CLOSE_S)

    def _endpoints(self) -> list[tuple[str, type[BaseModel] | None, Callable[[Any], Body]]]:
        """Return path, kind of the body and function of each; without a kind it gets what the path names."""
        served = {"model_name": self._engine.base_model, "max_context_length": self._engine.max_tokens}
        return [
            ("healthz", None, lambda _: {"status": "ok"}),
            ("get_server_capabilities", None, lambda _: {"supported_models": [served]}),
            ("client/config", None, lambda _: {"parallel_fwdbwd_chunks": False}),
            ("client/dynamic_config", None, lambda _: {}),
            ("telemetry", None, lambda _: {"status": "accepted"}),
            ("create_session", None, self._create_session),
            ("session_heartbeat", types.SessionHeartbeatRequest, self._beat),
            ("sessions/{session}/finish", None, lambda _: {}),  # its heartbeats end, too
            ("create_model", types.CreateModelRequest, self._create_model),
            ("get_info", types.GetInfoRequest, self._get_info),
            ("weights_info", _Checkpoint, lambda body: asdict(self._engine.settings_of(body.tinker_path)) | _IS_LORA),
            ("optim_step", types.OptimStepRequest, self._optim_step),
            ("save_weights", types.SaveWeightsRequest, self._save_weights),
            ("save_weights_for_sampler", types.SaveWeightsForSamplerRequest, self._save_for_sampler),
            ("load_weights", types.LoadWeightsRequest, self._load_weights),
            ("create_sampling_session", types.CreateSamplingSessionRequest, self._create_sampler),
            ("samplers/{sampler_id}", None, self._describe_sampler),
            ("asample", types.SampleRequest, self._sample),
        ]

    @web.middleware
    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Require the key, and write errors as the SDK reads them."""
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        shown = request.headers.get("X-API-Key", f"{KEY}{bearer}").encode(errors="replace")
        if not hmac.compare_digest(shown, self._key.encode()):
            return _error(401, "requests must show the key of this server: got none or another. Set TINKER_API_KEY.")
        try:
            return await handler(request)
        except _UnknownError as error:
            return _error(404, str(error.args[0]))
        except (ValueError, DecodeError, web.RequestPayloadError) as error:
            return _error(422, str(error))
        except web.HTTPNotFound:  # the SDK would repeat it for minutes after 501
            path = f"{request.method} {request.path}"
            return _error(404, f"{path} must be an endpoint that AReaLite has: it is not implemented.")

    # Futures

    def _start(self, model: str | None, name: _Name, work: Coroutine[Any, Any, Any]) -> Body:
        """Start work, unless the request was sent before, and return the id of its future."""
        request = None if None in name else self._ids.get(name)
        if request is not None:
            work.close()
            return {"request_id": request, "model_id": model}
        request = self._ids[name] = uuid.uuid4().hex
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: task.cancelled() or task.exception())  # a client may never ask for it
        self._futures[request] = name, task
        oldest_name, oldest = next(iter(self._futures.values()))
        if len(self._futures) > _NUM_FUTURES and oldest.done():
            self._futures.popitem(last=False)
            self._ids.pop(oldest_name, None)
        return {"request_id": request, "model_id": model}

    async def _run(self, method: str, **arguments: Any) -> Any:
        """Run a method of `Models` after all that were asked for before."""
        command = Command(method, arguments, Future())
        self._commands.put(command)
        return await asyncio.wrap_future(command.outcome)

    def _on_model(self, body: Any, answer: Callable[[Any], Any], method: str, **arguments: Any) -> Body:
        """Start a method of `Models` on a client's model; the result of the future is `answer` of its result."""
        self._require_model(body.model_id)

        async def work() -> Any:
            return answer(await self._run(method, model=body.model_id, **arguments))

        return self._start(body.model_id, (body.model_id, body.seq_id or None), work())

    async def _retrieve(self, request: web.Request) -> web.Response:
        name = types.FutureRetrieveRequest.model_validate_json(await request.read()).request_id
        if name not in self._futures:
            raise _UnknownError(f"request_id must be one of the last {_NUM_FUTURES}: got {name}.")
        _, task = self._futures[name]
        await asyncio.wait({task}, timeout=_POLL_S)
        if not task.done():
            again = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return web.json_response(again, status=408)
        if (error := task.exception()) is not None:
            is_users = isinstance(error, ValueError | LookupError)
            if not is_users:
                logger.error("a request of a client failed", exc_info=error)
            return web.json_response({"error": str(error), "category": "user" if is_users else "server"})
        if isinstance(result := task.result(), bytes):
            return web.Response(body=result, content_type="application/x-protobuf")
        return web.json_response(result)

    # Sessions and models

    def _create_session(self, _: Body) -> Body:
        self._sessions[session := uuid.uuid4().hex] = time.monotonic()
        return {"session_id": session}

    def _beat(self, body: types.SessionHeartbeatRequest) -> Body:
        if body.session_id not in self._sessions:
            raise _UnknownError(f"session_id must be an open session: got {body.session_id}. Connect again.")
        self._sessions[body.session_id] = time.monotonic()
        return {}

    def _require_base(self, base_model: str | None) -> None:
        if base_model != (served := self._engine.base_model):
            raise ValueError(f"base_model must be {served}, which is served here: got {base_model}.")

    def _require_model(self, model: str) -> _Model:
        if model not in self._models:
            must = f"must be a model of an open session, as models end with the server: got {model}"
            raise _UnknownError(f"model_id {must}. Make a model and load its last checkpoint.")
        return self._models[model]

    def _create_model(self, body: types.CreateModelRequest) -> Body:
        self._require_base(body.base_model)
        highest, optimizer = self._engine.lora_rank, body.optimizer_config.type
        lora = body.lora_config or types.LoraConfig(rank=highest)
        if not 0 < lora.rank <= highest:
            more = "Start the server with a higher --lora-rank."
            raise ValueError(f"rank must be 1 to {highest}: got {lora.rank}. {more}")
        if optimizer != "adamw":
            raise ValueError(f"optimizer_config must be adamw: got {optimizer}, which is not implemented.")
        settings = Settings(body.base_model, lora.rank, lora.train_attn, lora.train_mlp)

        async def create() -> Body:
            return {"type": "create_model", "model_id": await self._create(body, settings, lora.seed or 0)}

        return self._start(None, ("create", body.session_id, body.model_seq_id), create())

    async def _create(self, body: Any, settings: Settings, seed: int) -> str:
        """Make a model and return its id; models of sessions that have ended make room."""
        session, model = body.session_id, f"{body.session_id}:train:{body.model_seq_id}"  # as the SDK computes it
        if session not in self._sessions:
            raise _UnknownError(f"session_id must be an open session: got {session}. Connect again.")
        for other, one in [*self._models.items()]:
            if time.monotonic() - self._sessions[one.session] > _SESSION_S:
                del self._models[other]
                await self._run("unload", model=other)
        await self._run("create", model=model, settings=settings, seed=seed)
        self._models[model] = _Model(settings, session)
        return model

    def _get_info(self, body: types.GetInfoRequest) -> Body:
        rank, name = self._require_model(body.model_id).settings.lora_rank, self._engine.base_model
        model = {"model_id": body.model_id, "model_name": name, "lora_rank": rank}
        return model | {"model_data": {"model_name": name, "tokenizer_id": name}} | _IS_LORA

    # Training

    async def _forward_backward(self, request: web.Request) -> web.Response:
        body, engine = proto.ForwardBackwardRequest.FromString(await request.read()), self._engine
        model, given = self._require_model(body.model_id), body.loss_fn_config_v2
        if texts := [name for name, one in given.items() if one.WhichOneof("value") != "number"]:
            raise ValueError(f"loss_fn_config must be of numbers: got a text in {texts[0]}. Remove it.")
        config = {name: one.number for name, one in given.items()}
        batch = wire.read_batch(body.data, inputs_of(body.loss_fn, config), engine.num_ids, engine.max_tokens)

        def answer(found: tuple[Any, float]) -> bytes:
            logprobs_BS, loss = found
            model.loss += 0.0 if body.forward_only else loss
            return wire.write_output(logprobs_BS, batch["attention_mask"].sum(1).tolist(), {"loss:sum": loss})

        call = {"batch": batch, "loss": body.loss_fn, "config": config, "with_gradient": not body.forward_only}
        return web.json_response(self._on_model(body, answer, "forward_backward", **call))

    def _optim_step(self, body: types.OptimStepRequest) -> Body:
        if not isinstance(params := body.optim_params, types.AdamParams):
            raise ValueError("optim_params must be AdamParams: got others, which are not implemented.")
        model = self._require_model(body.model_id)

        def answer(norm: float) -> Body:
            model.num_steps += 1
            numbers = f"loss {model.loss:.6g} | gradient norm {norm:.3g} | lr {params.learning_rate:.3g}"
            name = f"{body.model_id[:8]}:{body.model_id.rpartition(':')[2]}"
            print(f"model {name} | step {model.num_steps} | {numbers}", flush=True)
            model.loss = 0.0
            return {"metrics": {"grad_norm": norm}}

        return self._on_model(body, answer, "optim_step", params=params.model_dump())

    # Checkpoints

    def _new_path(self, body: Any, kind: str, *, overwrites: bool = False) -> str:
        path = f"tinker://{body.model_id}/{kind}/{body.path or uuid.uuid4().hex}"
        is_repeated = (body.model_id, body.seq_id) in self._ids
        if self._engine.folder_of(path).exists() and not (overwrites or is_repeated):
            raise ValueError(f"path must be new: got {body.path}, which exists. Choose another one, or overwrite.")
        return path

    def _save_weights(self, body: types.SaveWeightsRequest) -> Body:
        path = self._new_path(body, "weights", overwrites=body.overwrite)
        return self._on_model(
            body, lambda _: {"type": "save_weights", "path": path}, "save", path=path, with_optim=True
        )

    def _save_for_sampler(self, body: types.SaveWeightsForSamplerRequest) -> Body:
        path = self._new_path(body, "sampler_weights")

        def answer(_: None) -> Body:
            saved = {"type": "save_weights_for_sampler", "path": path}
            if body.path is not None:
                return saved
            (kept := self._unnamed[body.model_id]).append(path)
            if len(kept) > _NUM_UNNAMED:
                shutil.rmtree(self._engine.folder_of(kept.popleft()), ignore_errors=True)
            return saved | {"sampling_session_id": self._sampler_of(path)}

        return self._on_model(body, answer, "save", path=path, with_optim=False)

    def _load_weights(self, body: types.LoadWeightsRequest) -> Body:
        settings, call = self._engine.settings_of(body.path), {"path": body.path, "with_optim": body.optimizer}
        if body.model_id is not None:
            answer = {"type": "load_weights", "path": body.path, "model_id": body.model_id}
            return self._on_model(body, lambda _: answer, "load", **call)

        async def load() -> Body:
            model = await self._create(body, settings, 0)
            await self._run("load", model=model, **call)
            return {"type": "load_weights", "path": body.path, "model_id": model}

        return self._start(None, ("create", body.session_id, body.model_seq_id), load())

    # Samplers

    def _sampler_of(self, path: str) -> str:
        self._samplers[sampler := uuid.uuid4().hex] = path
        return sampler

    def _create_sampler(self, body: types.CreateSamplingSessionRequest) -> Body:
        if body.model_path is None:
            self._require_base(body.base_model)
        else:
            self._engine.settings_of(body.model_path)
        return {"sampling_session_id": self._sampler_of(body.model_path or BASE)}

    def _path_of(self, sampler: str | None) -> str:
        if sampler not in self._samplers:
            must = f"must be a sampler of this server: got {sampler}"
            raise _UnknownError(f"sampling_session_id {must}. Make one from its checkpoint.")
        return self._samplers[sampler]

    def _describe_sampler(self, body: Body) -> Body:
        return body | {"base_model": self._engine.base_model, "model_path": self._path_of(body["sampler_id"]) or None}

    def _sample(self, body: types.SampleRequest) -> Body:
        path, num_samples, seed = self._path_of(body.sampling_session_id), body.num_samples, body.sampling_params.seed
        if absent := [name for name in (*_ABSENT, "prompt_logprobs_last_n") if getattr(body, name)]:
            raise ValueError(f"{absent[0]} must be left out: it is not implemented. Remove it.")
        if not 0 < num_samples <= _MAX_SAMPLES:
            raise ValueError(f"num_samples must be 1 to {_MAX_SAMPLES}: got {num_samples}. Send several requests.")
        prompt = body.prompt.to_ints()
        gconfig = sampling_of(body.sampling_params, self._engine.max_tokens - len(prompt))
        seeds = [{} if seed is None else {"seed": seed + place} for place in range(num_samples)]
        requests = [ModelRequest(prompt, gconfig, metadata=one) for one in seeds]

        async def sample() -> bytes:
            samples = await self._sampler.sample(path, requests)
            logprobs = await self._run("logprobs", path=path, tokens=prompt) if body.prompt_logprobs else None
            return wire.write_samples(samples, logprobs)

        answer = self._start(None, (body.sampling_session_id, body.seq_id), sample())
        return answer | {"sample_sequence_ids": [f"{answer['request_id']}-{place}" for place in range(num_samples)]}


class _Checkpoint(BaseModel):
    tinker_path: str


_IS_LORA = {"is_lora": True, "train_unembed": False}


def _parsed(kind: type[BaseModel] | None, handle: Callable[[Any], Body]) -> Callable[..., Awaitable[web.Response]]:
    """Return a handler that reads a body as `kind`, or the names in the path."""

    async def answer(request: web.Request) -> web.Response:
        raw = await request.read()
        return web.json_response(handle(kind.model_validate_json(raw) if kind else dict(request.match_info)))

    return answer


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": text, "detail": text}, status=status)
