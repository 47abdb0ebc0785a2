"""The dialect of SGLang (0.4.9 and later), which our embedded server speaks as well.

Newer servers want an update by broadcast wrapped in begin and end calls, and say it by having those endpoints. Fields
that only embedded servers know are sent to them alone: fingerprints, and the deadline of a broadcast group.
"""

from __future__ import annotations

import contextlib
import math
import re
from typing import cast

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

_GENERATE = "/generate"
_RESERVED_TOKENS = 6
"""What SGLang keeps of its context from prompts; it refuses prompts and token limits that add up to more than that."""
_OVERFLOW = re.compile("context length|maximum allowed (input )?length|larger context")
"""In what SGLang (at three places) and our server say of a prompt that leaves no room."""


class SGLangDialect(Dialect):
    """How SGLang and `arealite.server` are talked to."""

    def __init__(self, *, is_lite: bool, pause_mode: PauseMode) -> None:
        self._is_lite = self.is_on_cpu = self.keeps_old_weights = is_lite
        self._pause_mode = pause_mode
        self._max_tokens: dict[str, int] = {}
        """By address: the longest prompt and completion that SGLang lets one ask for."""
        self._takes_seeds: set[str] = set()
        """Addresses of servers that sample by seed; others ignore one, and those before 0.5 refuse it."""

    async def meet(self, caller: Caller) -> ServerFacts:
        """Refuse a server of another kind, and one that would use keys and values of old weights for new requests."""
        try:
            info = await caller.get("/get_model_info")
        except StatusError as error:
            if error.status != 404:
                raise
            raise ServerError(
                f"http://{caller.address} must be a server of SGLang, or of arealite.server: {error} "
                "Correct rollout.server_addrs, or the backend in allocation_mode or rollout.backend."
            ) from error
        if self._is_lite:
            return ServerFacts(str(info["dtype"]))
        info = await caller.get("/get_server_info")
        if "max_req_input_len" in info:
            self._max_tokens[caller.address] = info["max_req_input_len"] + _RESERVED_TOKENS
        if info.get("enable_deterministic_inference"):
            self._takes_seeds.add(caller.address)
        if self._pause_mode == "in_place" and not info.get("disable_radix_cache"):
            raise ConfigError(
                f"rollout.pause_mode must not be in_place with the prefix cache of SGLang: got both at "
                f"{caller.address}, so that new requests would go on with keys and values of old weights for ever. "
                "Start it with --disable-radix-cache, or set rollout.pause_mode=retract."
            )
        dtype = None if info.get("dtype") in (None, "auto") else str(info["dtype"])
        return ServerFacts(dtype, num_gpus=int(info.get("tp_size", 1)))

    async def take_over(self, caller: Caller) -> None:
        """Let a server go on that a run before us may have left paused; `begin` ends an update that it left open."""
        await self.resume(caller)

    def generate_call(
        self, address: str, req: ModelRequest, tokens: list[int], seed: int, *, ignore_eos: bool = False
    ) -> tuple[str, Json]:
        """Return endpoint and payload that let a server continue `req` after `tokens`."""
        gconfig, input_ids = req.gconfig, [*req.input_ids, *tokens]
        left = self._max_tokens.get(address, len(input_ids) + gconfig.max_new_tokens) - len(input_ids)
        sampling: Json = {
            "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
            "top_p": gconfig.top_p,
            "top_k": -1 if gconfig.top_k >= ALL_TOKENS else gconfig.top_k,
            "max_new_tokens": max(1, min(gconfig.max_new_tokens - len(tokens), left)),
            "min_new_tokens": max(0, gconfig.min_new_tokens - len(tokens)),
            "stop_token_ids": gconfig.stop_token_ids,
        }
        if self._is_lite or address in self._takes_seeds:
            sampling["sampling_seed"] = seed
        if gconfig.stop:
            sampling["stop"] = gconfig.stop
        if ignore_eos:
            sampling["ignore_eos"] = True
        payload = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True, "stream": False}
        return _GENERATE, payload

    def parse_segment(self, address: str, reply: Json, max_tokens: int) -> Segment:
        """Check a reply and return what it adds."""
        try:
            segment = _parse(address, reply, max_tokens)
        except (AttributeError, TypeError, KeyError, IndexError) as error:
            raise bad_reply(address, _GENERATE, "have the fields of SGLang", reply) from error
        return segment.kept_in_place() if self._pause_mode == "in_place" and not self._is_lite else segment

    def is_overflow(self, error: StatusError) -> bool:
        """Tell whether a server refused a request because its context is too short."""
        return error.status == 400 and _OVERFLOW.search(str(error)) is not None

    def verifies(self, meta: WeightUpdateMeta) -> bool:
        """Tell whether servers compare the fingerprints of what they get that way."""
        return self._is_lite

    async def pause(self, caller: Caller) -> None:
        """Stop generating; what becomes of requests in flight is `rollout.pause_mode`."""
        await _post(caller, "/pause_generation", {"mode": self._pause_mode})

    async def resume(self, caller: Caller) -> None:
        """Go on generating."""
        await _post(caller, "/continue_generation", {})

    async def load(self, caller: Caller, path: str, version: int, proof: Proof | None) -> list[str]:
        """Take the weights of a folder as `version`, and return the tensors that were taken although they differ."""
        payload = {"model_path": path, "weight_version": str(version), "flush_cache": self._flushes_cache}
        reply = await _post(caller, "/update_weights_from_disk", payload | _spelled(proof))
        return list(reply.get("mismatched", []))

    async def join(self, caller: Caller, plan: BroadcastPlan, timeout_s: float) -> None:
        """Join a broadcast group; an embedded server bounds joining and each bucket by `timeout_s`."""
        bounded = {"timeout_s": timeout_s} if self._is_lite else {}
        await _post(caller, "/init_weights_update_group", plan.payload(caller.address) | bounded)

    async def leave(self, caller: Caller, plan: BroadcastPlan) -> None:
        """Leave a broadcast group."""
        await _post(caller, "/destroy_weights_update_group", {"group_name": plan.name})

    async def begin(self, caller: Caller) -> bool:
        """Start an update by broadcast, ending one that was never finished; return whether there are such sessions."""
        try:
            await _post(caller, "/begin_weight_update", {})
        except StatusError as error:
            if error.status == 404:
                return False
            with contextlib.suppress(StatusError):
                await _post(caller, "/end_weight_update", {})
            await _post(caller, "/begin_weight_update", {})
        return True

    async def receive(self, caller: Caller, plan: BroadcastPlan, specs: list[ParamSpec], version: int | None) -> None:
        """Take one bucket from the group; the last one comes with the version."""
        is_last = version is not None
        payload = described(specs) | {
            "group_name": plan.name,
            "flush_cache": is_last and self._flushes_cache,
            "weight_version": str(version) if is_last else None,
        }
        await _post(caller, "/update_weights_from_distributed", payload)

    async def end(self, caller: Caller, version: int, proof: Proof | None) -> list[str]:
        """Finish an update by broadcast, and return the tensors that were taken although they differ."""
        reply = await _post(caller, "/end_weight_update", _spelled(proof))
        return list(reply.get("mismatched", []))

    @property
    def _flushes_cache(self) -> bool:
        """SGLang refuses to flush what requests that stay in place still need."""
        return self._is_lite or self._pause_mode != "in_place"


async def _post(caller: Caller, endpoint: str, payload: Json) -> Json:
    reply = await caller.post(endpoint, payload)
    if reply.get("success") is False:
        raise bad_reply(caller.address, endpoint, "report success", reply)
    return reply


def _spelled(proof: Proof | None) -> Json:
    """Return the fields of our own dialect that let a server verify what it got."""
    if proof is None:
        return {}
    return {"fingerprints": proof.fingerprints, "on_mismatch": "accept" if proof.accepts_mismatch else "refuse"}


def _parse(address: str, reply: Json, max_tokens: int) -> Segment:
    def require(is_right: bool, rule: str) -> None:
        if not is_right:
            raise bad_reply(address, _GENERATE, rule, reply)

    tokens, meta_info = reply["output_ids"], reply["meta_info"]
    require(type(tokens) is list and set(map(type, tokens)) <= {int}, "have a list of ints output_ids")
    require(len(tokens) <= max_tokens, f"have at most {max_tokens} tokens")
    pairs = meta_info.get("output_token_logprobs") or []
    require(len(pairs) == len(tokens), f"have {len(tokens)} output_token_logprobs, one per token")
    require([pair[1] for pair in pairs] == tokens, "have the logprobs of its own tokens")
    logprobs = [pair[0] for pair in pairs]
    require(set(map(type, logprobs)) <= {float, int} and all(map(math.isfinite, logprobs)), "have finite logprobs")
    finish = meta_info["finish_reason"]["type"]
    require(finish in ("stop", "length", "abort"), "have a finish_reason of type stop, length or abort")
    stale = meta_info.get("stale_kv_tokens", 0)  # only our own servers tell
    require(type(stale) is int and 0 <= stale <= len(tokens), "have at most as many stale_kv_tokens as tokens")
    whole = [{"version": meta_info.get("weight_version"), "start": 0, "end": len(tokens)}]
    versions = token_versions(meta_info.get("weight_versions") or whole, len(tokens), require)
    return Segment(tokens, logprobs, versions, cast("Finish", finish), stale)
