"""The dialect of SGLang 0.5 (and of our embedded server) for generation.

Invariant: nothing from a reply is believed before it was checked: as many finite logprobs as token ids, the ids they
belong to, and versions that cover every token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Coroutine
from typing import Any, cast

from arealite.api.cli_args import ALL_TOKENS, InferenceEngineConfig
from arealite.api.io_struct import ModelRequest, WeightUpdateMeta
from arealite.engine.remote_client import Finish, RemoteInferenceEngine, Segment
from arealite.engine.server_http import Json, StatusError, bad_reply
from arealite.engine.sglang_weights import WeightReceiver

_GENERATE = "/generate"
_OVERFLOW = re.compile("context length|maximum allowed (input )?length|larger context")
"""In what SGLang (at three places) and our server say of a prompt that leaves no room."""
_UNTOLD = ("default", None)
"""What a server says that was started without a version."""


class RemoteSGLangEngine(RemoteInferenceEngine):
    """An inference engine on SGLang or `arealite.server` processes."""

    def __init__(self, config: InferenceEngineConfig) -> None:
        super().__init__(config)
        is_lite = config.backend == "lite"
        self._receiver = WeightReceiver(
            self.servers,
            config.weight_check,
            is_lite=is_lite,
            tp_size=config.server_tp_size,
            keeps_kv=is_lite and config.allow_stale_kv,
        )

    def _generate_call(self, req: ModelRequest, tokens: list[int], seed: int) -> tuple[str, Json]:
        gconfig = req.gconfig
        sampling: Json = {
            "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
            "top_p": gconfig.top_p,
            "top_k": -1 if gconfig.top_k >= ALL_TOKENS else gconfig.top_k,
            "max_new_tokens": gconfig.max_new_tokens - len(tokens),
            "min_new_tokens": max(0, gconfig.min_new_tokens - len(tokens)),
            "stop_token_ids": gconfig.stop_token_ids,
            "sampling_seed": seed,
        }
        if gconfig.stop:
            sampling["stop"] = gconfig.stop
        input_ids = [*req.input_ids, *tokens]
        return _GENERATE, {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True, "stream": False}

    def _is_overflow(self, error: StatusError) -> bool:
        return error.status == 400 and _OVERFLOW.search(str(error)) is not None

    def _canary_call(self, req: ModelRequest, seed: int) -> tuple[str, Json]:
        endpoint, payload = self._generate_call(req, [], seed)
        payload["sampling_params"]["ignore_eos"] = True
        return endpoint, payload

    def _parse_segment(self, address: str, reply: Json, max_tokens: int) -> Segment:
        return parse_segment(address, reply, max_tokens)

    def metrics(self) -> dict[str, float]:
        """Add the tensors that servers took although they were not what was sent."""
        metrics = super().metrics()
        return metrics and metrics | {"weights/mismatched_tensors": float(self._receiver.num_mismatched)}

    async def _meet_sender(self, meta: WeightUpdateMeta) -> Coroutine[Any, Any, None]:
        return self._receiver.receive(await self._receiver.begin(self._http, meta, self._may_generate))


def parse_segment(address: str, reply: Json, max_tokens: int) -> Segment:
    """Check a reply of `/generate` and return what it adds; `versions` is None when the server does not tell them."""
    try:
        return _parse(address, reply, max_tokens)
    except (AttributeError, TypeError, KeyError, IndexError) as error:
        raise bad_reply(address, _GENERATE, "have the fields of SGLang", reply) from error


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
    versions = _versions(address, reply, meta_info, len(tokens))
    return Segment(tokens, logprobs, versions, cast("Finish", finish), stale)


def _versions(address: str, reply: Json, meta_info: Json, num_tokens: int) -> list[int] | None:
    """Return the version of each token: from spans, else the one of the whole reply."""
    spans = meta_info.get("weight_versions")
    if spans is None:
        spans = [{"version": meta_info.get("weight_version"), "start": 0, "end": num_tokens}]
    versions: list[int] = []
    for span in spans:
        if span["version"] in _UNTOLD:
            return None
        if span["start"] != len(versions) or not str(span["version"]).isdecimal():
            raise bad_reply(address, _GENERATE, "have contiguous spans of integer versions", reply)
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != num_tokens:
        raise bad_reply(address, _GENERATE, f"have versions for its {num_tokens} tokens", reply)
    return versions
