"""HTTP around the generation engine, in SGLang's protocol. A client that disconnects frees its slot.

New weights arrive all or none: tensors are staged and swapped in at the end, so the old weights survive a sender that
dies half-way and tensors whose fingerprints differ. A failed transfer closes the group, which fails the sender too.
Fingerprints cover all weights, also those of an earlier update that a partial update keeps.

Status: 400 when the client must change its request; 401 without the run's secret (all but GET /health); 403 and 415 for
requests of web pages; 409 for tensors whose fingerprints differ; 500 when generation failed.
"""

import asyncio
import functools
import itertools
import json
import logging
import threading
from asyncio import wrap_future
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedTokenizerBase

from arealite.generation.engine import GenerationEngine
from arealite.generation.model_runner import ModelRunner, check_shapes, read_checkpoint
from arealite.generation.request import GenerationError, GenerationRequest
from arealite.server import protocol
from arealite.utils.background import in_thread
from arealite.utils.files import reading
from arealite.utils.fingerprint import differing, fingerprints
from arealite.utils.hf import load_causal_lm, load_hf_tokenizer, load_image_processor, local_folder
from arealite.utils.images import Images, from_base64, process_images, sees_images
from arealite.utils.secret import is_authorized, refusal
from arealite.utils.token_ids import expansion
from arealite.utils.weight_transfer import DTYPES, BroadcastGroup, close_group, join_group, receive_buckets

logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 64 * 2**20
NUM_CACHED_IMAGES = 16  # prompts whose patches are kept
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """The endpoints."""

    def __init__(
        self,
        engine: GenerationEngine,
        *,
        model_path: str,
        image_processor: Any = None,
        seed: int = 0,
        secret: str | None = None,
    ) -> None:
        """A model that sees images must have an `image_processor`."""
        self._engine, self._image_processor = engine, image_processor
        self._images_of = functools.lru_cache(maxsize=NUM_CACHED_IMAGES)(self._process_images)
        self._image_lock = threading.Lock()  # samples of a group wait for the thread that computes their patches
        self._model_path, self._seed, self._secret = model_path, seed, secret
        self._num_unseeded = itertools.count()
        self._weights = WeightReceiver(engine)
        self.app = web.Application(middlewares=[answer_errors, self._authorize], client_max_size=MAX_BODY_BYTES)
        self.app.on_cleanup.append(self._weights.leave_all)
        self.app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/get_model_info", self.model_info),
                web.get("/server_info", self.server_info),
                web.post("/generate", self.generate),
                _post("/pause_generation", protocol.PauseBody, lambda body: wrap_future(engine.pause(body.mode))),
                _post("/continue_generation", protocol.Body, lambda _: wrap_future(engine.resume())),
                _post("/init_weights_update_group", protocol.JoinGroupBody, self._weights.join),
                _post("/destroy_weights_update_group", protocol.LeaveGroupBody, self._weights.leave),
                _post("/begin_weight_update", protocol.Body, self._weights.begin),
                _post("/update_weights_from_distributed", protocol.BucketBody, self._weights.stage),
                _post("/end_weight_update", protocol.VerifiedBody, self._weights.end),
                _post("/update_weights_from_disk", protocol.DiskUpdateBody, self._weights.load_from_disk),
            ]
        )

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Require the secret, except for GET /health; without a secret refuse what web pages may send."""
        kind = request.content_type
        if self._secret is None and "Origin" in request.headers:
            return error_response(403, "requests must not come from a web page: got an Origin header. Leave it out.")
        if self._secret is None and request.body_exists and kind != "application/json":
            return error_response(415, f"Content-Type must be application/json: got {kind}. Set the header.")
        is_open = self._secret is None or (request.method, request.path) == ("GET", "/health")
        if is_open or is_authorized(request.headers.get("Authorization"), self._secret or ""):
            return await handler(request)
        return error_response(401, refusal(request.method, request.path))

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self._model_path,
                "weight_version": self._engine.version,
                "dtype": self._engine.dtype,
                "vocab_size": self._engine.vocab_size,
                "context_length": self._engine.context,
                "slots": self._engine.stats().slots,
            }
        )

    async def server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self._model_path, **asdict(self._engine.stats())})

    async def generate(self, request: web.Request) -> web.Response:
        body = protocol.parse(protocol.GenerateBody, await request.read())
        tokens, params = body.input_ids, body.sampling_params.to_params(self._next_seed)
        images = await asyncio.to_thread(self._images, tuple(body.image_data)) if body.image_data else None
        if images is not None:
            tokens = [tokens[place] for place in expansion(tokens, images.num_tokens, self._engine.image_token_id)]
        generation = GenerationRequest(body.rid, tuple(tokens), params, body.return_sampling_mask, images)
        result = await wrap_future(self._engine.submit(generation))
        answer = protocol.reply(generation, result)
        if body.return_logprob:
            pairs = zip(result.logprobs, result.output_ids, strict=True)
            answer["meta_info"]["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        if body.return_sampling_mask:
            answer["meta_info"]["output_token_sampling_mask"] = result.kept
            answer["meta_info"]["output_token_sampling_logprobs"] = result.logprobs
        return web.json_response(answer)

    def _images(self, image_data: tuple[str, ...]) -> Images:
        """Return equal images as one object, which samples of a group share."""
        if self._image_processor is None:
            raise ValueError(
                "image_data must be left out: got images for a model that sees none. Serve a vision model."
            )
        with self._image_lock:
            return self._images_of(image_data)

    def _process_images(self, image_data: tuple[str, ...]) -> Images:
        return process_images(self._image_processor, [from_base64(image) for image in image_data])

    def _next_seed(self) -> int:
        return hash((self._seed, next(self._num_unseeded)))


class MismatchError(ValueError):
    """Tensors did not arrive as they were sent."""


class WeightReceiver:
    """The server's half of a weight update. One request at a time changes its state; groups form beside them."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._groups: dict[str, BroadcastGroup] = {}
        self._staged: dict[str, torch.Tensor] | None = None  # None outside begin/end
        self._version: str | None = None
        self._is_partial = False  # whether weights that are not staged keep their values
        self._next_fingerprints: dict[str, str] = {}  # of the engine's weights after this update, if it is verified
        self._fingerprints: dict[str, str] | None = None  # of the engine's weights; None before the first update
        self._lock = asyncio.Lock()

    async def load_from_disk(self, body: protocol.DiskUpdateBody) -> list[str]:
        """Load a checkpoint folder; return the tensors whose fingerprints differ from the sender's."""
        async with self._lock:
            self._staged, self._version = await in_thread(read_checkpoint, body.model_path), body.weight_version
            self._is_partial, self._next_fingerprints = False, {}
            return await self._finish(body)

    async def join(self, body: protocol.JoinGroupBody) -> None:
        """Join the sender's broadcast group as rank `rank_offset`. Other requests do not wait until it forms."""
        name = body.group_name
        if name in self._groups:
            raise ValueError(f"group_name must be new: got {name}. Destroy that group first.")
        place = body.master_address, body.master_port, body.rank_offset, body.world_size, name
        join = functools.partial(join_group, *place, backend=body.backend, timeout_s=body.timeout_s)
        self._groups[name] = await in_thread(join)

    async def leave(self, body: protocol.LeaveGroupBody) -> None:
        """Leave a group, after a transfer in progress."""
        async with self._lock:
            self._close(body.group_name)

    async def begin(self, _: protocol.Body) -> None:
        """Start an update, dropping an unfinished one."""
        async with self._lock:
            self._staged, self._version = {}, None
            self._is_partial, self._next_fingerprints = False, {}

    async def stage(self, body: protocol.BucketBody) -> None:
        """Receive tensors, bucket by bucket."""
        async with self._lock:
            groups: list[BroadcastGroup] = []
            for name in body.groups:
                if (group := self._groups.get(name)) is None:
                    raise ValueError(f"group_name must be a group we joined: got {name}. Join it first.")
                groups.append(group)
            try:
                if self._staged is None:
                    raise ValueError("/begin_weight_update must come first: got a bucket outside of an update.")
                check_shapes({spec.name: spec.shape for spec in body.specs}, self._engine.weight_shapes)
                buckets = receive_buckets(groups, body.specs, body.bucket_sizes or [len(groups)])
                while bucket := await in_thread(next, buckets, None):
                    self._staged.update(bucket)
            except BaseException:  # also a cancellation must stop the senders
                self._staged = None
                for name in body.groups:
                    self._close(name)
                raise
            self._version = body.weight_version or self._version

    async def end(self, body: protocol.VerifiedBody) -> list[str]:
        """Swap the staged weights in; return the tensors whose fingerprints differ from the sender's."""
        async with self._lock:
            return await self._finish(body)

    async def _finish(self, body: protocol.VerifiedBody) -> list[str]:
        """Verify the staged tensors; hand them to the engine unless the body says `only_stage`."""
        staged, self._staged = self._staged, None
        if staged is None:
            raise ValueError("/begin_weight_update must come first: got the end of no update.")
        wrong = await self._verify(staged, body)
        if body.only_stage:
            self._staged = staged
            return wrong
        await wrap_future(self._engine.update_weights(staged, self._version, is_partial=self._is_partial))
        self._fingerprints = self._next_fingerprints
        return wrong

    async def _verify(self, staged: dict[str, torch.Tensor], body: protocol.VerifiedBody) -> list[str]:
        """Return the tensors whose fingerprints differ; ValueError if the sender wants those refused, or if a partial
        update is the first one."""
        if body.is_partial:
            if self._fingerprints is None:
                raise ValueError(
                    "a partial update must follow a whole one: got none since this server started. Send every tensor."
                )
            self._is_partial = True
        if body.fingerprints is None:
            return []
        kept = (self._fingerprints or {}) if self._is_partial else {}
        self._next_fingerprints = kept | await in_thread(fingerprints, staged)
        wrong = differing(self._next_fingerprints, body.fingerprints)
        if wrong and body.on_mismatch == "refuse":
            raise MismatchError(
                f"tensors must arrive as they were sent: got {len(wrong)} of {len(body.fingerprints)} with other "
                f"fingerprints, {', '.join(wrong[:5])}. The old weights stay; send them again."
            )
        return wrong

    async def leave_all(self, _: object) -> None:
        """Leave all groups, as the application ends."""
        for name in list(self._groups):
            self._close(name)

    def _close(self, group_name: str) -> None:
        if (group := self._groups.pop(group_name, None)) is not None:
            close_group(group)


def _post(path: str, body_type: type[protocol.M], action: Callable[[protocol.M], Awaitable[object]]) -> web.RouteDef:
    """Route POSTs to an action that returns a list of mismatched tensors, or nothing."""

    async def handle(request: web.Request) -> web.Response:
        outcome = await action(protocol.parse(body_type, await request.read()))
        more = {"mismatched": outcome} if isinstance(outcome, list) else {}
        return web.json_response({"success": True, "message": "done"} | more)

    return web.post(path, handle)


def error_response(status: int, message: str) -> web.Response:
    """Reply with an error, under every name that clients look for."""
    return web.json_response({"success": False, "message": message, "error": {"message": message}}, status=status)


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into JSON replies."""
    try:
        return await handler(request)
    except GenerationError as error:
        return error_response(500, str(error))
    except (ValueError, OSError, web.RequestPayloadError) as error:
        return error_response(409 if isinstance(error, MismatchError) else 400, str(error))
    except web.HTTPException as error:
        return error_response(error.status, f"{request.method} {request.path}: {error.reason}")
    except Exception as error:  # a bug must not look like a dead connection
        logger.exception("%s %s failed", request.method, request.path)
        return error_response(500, f"{type(error).__name__}: {error}")


def load_server(
    path: str,
    *,
    dtype: str,
    device: str,
    slots: int,
    context: int,
    threads: int,
    deterministic: bool,
    allow_stale_kv: bool,
    seed: int,
    secret: str | None,
    weight_version: str = "0",
) -> tuple[GenerationEngine, Server]:
    """Load a model and start the thread that generates; ValueError, OSError or ImportError if it can't be served.

    `seed` is for requests without a seed, `weight_version` the version of the weights in the folder."""
    folder = local_folder(path)
    options = {"dtype": DTYPES[dtype], "local_files_only": True, "attn_implementation": "sdpa"}
    try:
        model, loading_info = load_causal_lm(folder, **options, output_loading_info=True)
    except RuntimeError as error:  # other shapes
        raise ValueError(
            f"{path} must hold the weights that its config describes: got {error} Save or download it again."
        ) from error
    except (StrictDataclassError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"the configs in {path} must describe a model of transformers: got {type(error).__name__}: {error}. "
            "Correct them, or download them again."
        ) from error
    if missing := sorted(loading_info["missing_keys"]):  # which transformers initialized
        raise ValueError(
            f"{path} must have every tensor of {type(model).__name__}: got {len(missing)} missing, "
            f"{', '.join(missing[:3])}. Save or download it again."
        )
    runner = ModelRunner(model.to(device), slots=slots, context=context, deterministic=deterministic)
    has_tokenizer = any((Path(folder) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
    tokenizer: PreTrainedTokenizerBase | None = load_hf_tokenizer(folder) if has_tokenizer else None
    image_processor = load_image_processor(folder) if sees_images(model.config) else None
    engine = GenerationEngine(
        runner,
        eos_ids=end_of_sequence_ids(folder, tokenizer),
        tokenizer=tokenizer,
        version=weight_version,
        threads=threads,
        allow_stale_kv=allow_stale_kv,
    )
    server = Server(engine, model_path=path, image_processor=image_processor, seed=seed, secret=secret)
    return engine, server


def end_of_sequence_ids(model_path: str, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Collect the ids that end a sequence from the folder's config, generation config and tokenizer."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = Path(model_path) / name
        if file.exists():
            with reading(file):
                eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
                ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
