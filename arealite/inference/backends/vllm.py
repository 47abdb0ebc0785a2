"""The dialect of vLLM (with VLLM_SERVER_DEV_MODE=1, as `arealite.launcher.serve.vllm_server` starts it).

Requests go by token ids: to the generate endpoint of newer servers (with --enable-scale-out), which tells the version
of every token, or to the OpenAI completions of any server, which does not, so that a reply belongs to the version that
the client has published. Weights come from a folder, which every vLLM can, or by broadcast, which takes the worker
extension that our launch wrapper brings along (`arealite.launcher.serve.vllm_weights`).
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import replace
from typing import Any

from arealite.api.config.rollout import ALL_TOKENS
from arealite.api.errors import ConfigError, ServerError
from arealite.api.io_struct import ModelRequest, ParamSpec, WeightUpdateMeta
from arealite.inference.backends.base import (
    BroadcastPlan,
    Caller,
    Dialect,
    Finish,
    PauseMode,
    Proof,
    Segment,
    described,
    token_versions,
)
from arealite.inference.http import Json, StatusError, bad_reply
from arealite.inference.pool import ServerFacts

_GENERATE = "/inference/v1/generate"
_COMPLETIONS = "/v1/completions"
_OVERFLOW = re.compile("maximum context length|maximum model length|max_tokens must be at least 1, got 0")
"""In what vLLM (at three places) says of a prompt that leaves no room."""
_OUR_EXTENSION = "arealite"
"""Name of the weight transfer that our launch wrapper brings along."""
_ABANDON_S = 10.0
"""In which a server must put its old weights back, also when the deadline of an update has passed."""
_FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}
_PAUSES = {"abort": "abort", "retract": "keep", "in_place": "keep&clear_cache=false", "wait": "wait"}


class VLLMDialect(Dialect):
    """How vLLM is talked to."""

    def __init__(self, *, pause_mode: PauseMode) -> None:
        self._pause_mode = pause_mode
        self._has_generate: set[str] = set()
        """Addresses of servers that have the generate endpoint."""
        self._extended: set[str] = set()
        """Addresses of servers that our launch wrapper has started."""

    async def meet(self, caller: Caller) -> ServerFacts:
        """Refuse a server of another kind, with raw logprobs, or with old keys and values, and note what it tells."""
        try:
            paths = (await caller.get("/openapi.json"))["paths"].keys()
            if _COMPLETIONS not in paths or "/pause" not in paths:
                raise KeyError(_COMPLETIONS if _COMPLETIONS not in paths else "/pause")
        except (StatusError, KeyError) as error:
            raise ServerError(
                f"http://{caller.address} must be a vLLM server with VLLM_SERVER_DEV_MODE=1: it has no {error}. "
                "Start it by python3 -m arealite.launcher.serve.vllm_server, or correct rollout.server_addrs or the "
                "backend."
            ) from error
        if _GENERATE in paths:
            self._has_generate.add(caller.address)
        elif self._pause_mode in ("retract", "in_place"):
            raise ConfigError(
                "rollout.pause_mode must be abort or wait for a vLLM that does not tell which weights sampled a token: "
                f"got {self._pause_mode} and {caller.address}. Start it with --enable-scale-out, or change "
                "rollout.pause_mode."
            )
        config: dict[str, Any] = (await caller.get("/server_info?config_format=json"))["vllm_config"]
        if (mode := config["model_config"]["logprobs_mode"]) != "processed_logprobs":
            raise ConfigError(
                f"vLLM must return logprobs of what it samples from: got {mode} at {caller.address}, which are those "
                "before temperature, top-p and top-k. Start it with --logprobs-mode processed_logprobs."
            )
        if self._pause_mode == "in_place" and config["cache_config"]["enable_prefix_caching"]:
            raise ConfigError(
                f"rollout.pause_mode must not be in_place with the prefix cache of vLLM: got both at {caller.address}, "
                "so that new requests would go on with keys and values of old weights. Start it with "
                "--no-enable-prefix-caching, or set rollout.pause_mode=retract."
            )
        transfer, parallel = config["weight_transfer_config"], config["parallel_config"]
        if transfer is not None and transfer["backend"] == _OUR_EXTENSION:
            self._extended.add(caller.address)
        return ServerFacts(
            dtype=str(config["model_config"]["dtype"]).removeprefix("torch."),
            num_gpus=parallel["world_size"] * parallel["data_parallel_size"],
            takes_broadcasts=caller.address in self._extended,
        )

    async def take_over(self, caller: Caller) -> None:
        """Let a server go on that a run before us may have left paused, with the layers that an update left empty."""
        if caller.address in self._extended:
            await _call_workers(caller, "abandon_weight_update")
        await self.resume(caller)

    def generate_call(
        self, address: str, req: ModelRequest, tokens: list[int], seed: int, *, ignore_eos: bool = False
    ) -> tuple[str, Json]:
        """Return endpoint and payload that let a server continue `req` after `tokens`.

        Nothing is left to defaults, which come from the model's generation_config.json. A continuation has a seed of
        its own, because vLLM draws the same random numbers again for the same seed, wherever a request begins.
        """
        gconfig = req.gconfig
        sampling: Json = {
            "max_tokens": gconfig.max_new_tokens - len(tokens),
            "min_tokens": max(0, gconfig.min_new_tokens - len(tokens)),
            "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
            "top_p": gconfig.top_p,
            "top_k": -1 if gconfig.top_k >= ALL_TOKENS else gconfig.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop": gconfig.stop,
            "skip_special_tokens": False,  # a stop string may be the text of one
            "stop_token_ids": gconfig.stop_token_ids,
            "ignore_eos": ignore_eos,
            "seed": (seed + len(tokens)) % 2**63,
            "logprobs": 0,  # only those of the sampled tokens
        }
        input_ids = [*req.input_ids, *tokens]
        if address in self._has_generate:
            return _GENERATE, {"token_ids": input_ids, "sampling_params": sampling}
        return _COMPLETIONS, {"prompt": input_ids, "return_token_ids": True} | sampling

    def parse_segment(self, address: str, reply: Json, max_tokens: int) -> Segment:
        """Check a reply and return what it adds."""
        endpoint = _GENERATE if address in self._has_generate else _COMPLETIONS
        try:
            (choice,) = reply["choices"]
            segment = _parse(address, endpoint, choice, max_tokens)
        except (AttributeError, TypeError, KeyError, IndexError, ValueError) as error:
            raise bad_reply(address, endpoint, "have the fields of vLLM", reply) from error
        spans_versions = endpoint == _GENERATE and self._pause_mode in ("retract", "in_place")
        if spans_versions and choice.get("weight_versions") is None:
            raise bad_reply(address, endpoint, "tell weight_versions, as rollout.pause_mode needs", reply)
        return segment.kept_in_place() if self._pause_mode == "in_place" else segment

    def is_overflow(self, error: StatusError) -> bool:
        """Tell whether a server refused a request because its context is too short."""
        return error.status == 400 and _OVERFLOW.search(str(error)) is not None

    def verifies(self, meta: WeightUpdateMeta) -> bool:
        """Tell whether servers compare the fingerprints of what they get that way."""
        return meta.type == "nccl"

    async def pause(self, caller: Caller) -> None:
        """Stop generating; what becomes of requests in flight is `rollout.pause_mode`."""
        await caller.post(f"/pause?mode={_PAUSES[self._pause_mode]}")

    async def resume(self, caller: Caller) -> None:
        """Go on generating."""
        await caller.post("/resume")

    async def load(self, caller: Caller, path: str, version: int, proof: Proof | None) -> list[str]:
        """Take the weights of a folder as `version`."""
        try:
            await _call_workers(caller, "reload_weights", weights_path=path)
        except ServerError:
            if caller.address in self._extended:
                with contextlib.suppress(ServerError):
                    soon = replace(caller, remaining_s=lambda: _ABANDON_S)
                    await _call_workers(soon, "abandon_weight_update")
            raise
        await caller.post("/update_weight_version", {"new_version": str(version)})
        await self._forget_cache(caller)
        return []

    async def join(self, caller: Caller, plan: BroadcastPlan, timeout_s: float) -> None:
        """Join a broadcast group, in which joining and each bucket are bounded by `timeout_s`."""
        init_info = plan.payload(caller.address) | {"timeout_s": timeout_s}
        await caller.post("/init_weight_transfer_engine", {"init_info": init_info})

    async def leave(self, caller: Caller, plan: BroadcastPlan) -> None:
        """Leave a broadcast group."""
        await _call_workers(caller, "abandon_weight_update")
        await caller.post("/shutdown_weight_transfer_engine")

    async def begin(self, caller: Caller) -> bool:
        """Start an update by broadcast, forgetting one that was never finished; `end` must finish it."""
        await _call_workers(caller, "abandon_weight_update")
        await caller.post("/start_weight_update")
        return True

    async def receive(self, caller: Caller, plan: BroadcastPlan, specs: list[ParamSpec], version: int | None) -> None:
        """Take one bucket from the group."""
        await caller.post("/update_weights", {"update_info": described(specs)})

    async def end(self, caller: Caller, version: int, proof: Proof | None) -> list[str]:
        """Finish an update by broadcast, and return the tensors that were taken although they differ."""
        differing: list[str] = []
        if proof is not None:
            by_worker = await _call_workers(caller, "mismatched_weights", fingerprints=proof.fingerprints)
            if not all(isinstance(names, list) for names in by_worker):  # a worker answers an earlier call
                raise ServerError(
                    f"every worker of {caller.address} must answer with a list of names: got {by_worker}. A call that "
                    "failed on one of them has put them out of step; start the server anew."
                )
            differing = sorted({name for names in by_worker for name in names})
        if proof is not None and differing and not proof.accepts_mismatch:
            raise ServerError(
                f"tensors must arrive at {caller.address} as they were sent: got {len(differing)} of "
                f"{len(proof.fingerprints)} with other fingerprints, {', '.join(differing[:5])}. Send them again."
            )
        await caller.post("/finish_weight_update", {"weight_version": str(version)})
        await self._forget_cache(caller)
        return differing

    async def _forget_cache(self, caller: Caller) -> None:
        """Drop the keys and values of old weights; there is no prefix cache if requests in flight keep theirs."""
        if self._pause_mode != "in_place":
            reply = await caller.post("/reset_prefix_cache")
            if reply.get("success") is False:
                raise bad_reply(caller.address, "/reset_prefix_cache", "report success", reply)


async def _call_workers(caller: Caller, method: str, **arguments: object) -> list[Any]:
    """Call a method of every worker of a server and return their results."""
    reply = await caller.post("/collective_rpc", {"method": method, "kwargs": arguments})
    results = reply.get("results")
    if not isinstance(results, list):
        raise bad_reply(caller.address, f"/collective_rpc {method}", "have results", reply)
    return results


def _parse(address: str, endpoint: str, choice: Json, max_tokens: int) -> Segment:
    def require(is_right: bool, rule: str) -> None:
        if not is_right:
            raise bad_reply(address, endpoint, rule, choice)

    tokens = choice["token_ids"]
    require(type(tokens) is list and set(map(type, tokens)) <= {int}, "have a list of ints token_ids")
    require(len(tokens) <= max_tokens, f"have at most {max_tokens} tokens")
    require(choice["finish_reason"] in _FINISHES, "have a finish_reason of stop, length or abort")
    versions = None
    if endpoint == _GENERATE:
        content = (choice["logprobs"] or {}).get("content") or []
        require([one["token_id"] for one in content] == tokens, "have the logprobs of its own tokens")
        logprobs = [one["logprob"] for one in content]
        spans = choice.get("weight_versions")
        versions = None if spans is None else token_versions(spans, len(tokens), require)
    else:
        logprobs = (choice["logprobs"] or {}).get("token_logprobs") or []
        require(len(logprobs) == len(tokens), f"have {len(tokens)} token_logprobs, one per token")
    require(set(map(type, logprobs)) <= {float, int} and all(map(math.isfinite, logprobs)), "have finite logprobs")
    return Segment(tokens, logprobs, versions, _FINISHES[choice["finish_reason"]])
