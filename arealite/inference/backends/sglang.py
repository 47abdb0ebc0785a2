"""SGLang, 0.5 and later. Where there are begin and end calls, an update by broadcast goes between them."""

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace

from arealite.api.config.rollout import ALL_TOKENS
from arealite.api.io_struct import ModelRequest
from arealite.api.servers import PauseMode
from arealite.inference.backends.base import (
    Backend,
    Bucket,
    Part,
    Segment,
    Sent,
    are_names,
    prompt_ids,
    require,
)
from arealite.inference.http import Json, ServerConnection, StatusError, bad_reply
from arealite.inference.pool import ServerFacts

_RESERVED_TOKENS = 6  # difference between SGLang's limit on prompts and its limit on prompt and completion together


class SGLangBackend(Backend):
    """The protocol of SGLang."""

    program, endpoint = "SGLang", "/generate"
    overflow = re.compile("context length|maximum allowed (input )?length|larger context")  # at three places, and ours
    takes_partial = frozenset({"disk", "nccl"})

    def __init__(self, *, pause_mode: PauseMode, accepts_mismatch: bool = False) -> None:
        super().__init__(pause_mode=pause_mode, accepts_mismatch=accepts_mismatch)
        self._flushes_cache = pause_mode != "in_place"  # SGLang refuses to flush what requests in flight still need
        self._max_tokens: dict[str, int] = {}  # by address: the longest prompt and completion together it accepts
        self._takes_seeds: set[str] = set()  # addresses that sample by seed; others ignore one
        self._begun: set[str] = set()  # addresses of servers in an update that `end` must finish

    async def _inspect(self, server: ServerConnection) -> ServerFacts:
        model = (await server.request("GET", "/get_model_info")).get("model_path")
        info = await server.request("GET", "/get_server_info")
        if "max_req_input_len" in info:
            self._max_tokens[server.address] = info["max_req_input_len"] + _RESERVED_TOKENS
        if info.get("enable_deterministic_inference"):
            self._takes_seeds.add(server.address)
        if not info.get("disable_radix_cache"):
            self._refuse_cache(server, "--disable-radix-cache")
        dtype = None if info.get("dtype") in (None, "auto") else str(info["dtype"])
        slots = info.get("slots") or info.get("max_running_requests")
        return ServerFacts(dtype, num_gpus=int(info.get("tp_size", 1)), model=model, slots=slots)

    def payload(self, address: str, req: ModelRequest, tokens: list[int], seed: int, ignore_eos: bool = False) -> Json:
        gconfig, input_ids = req.gconfig, [*req.input_ids, *tokens]
        left = self._max_tokens.get(address, len(input_ids) + gconfig.max_new_tokens) - len(input_ids)
        max_new_tokens = max(1, min(gconfig.max_new_tokens - len(tokens), left))
        sampling: Json = {
            "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
            "top_p": gconfig.top_p,
            "top_k": -1 if gconfig.top_k >= ALL_TOKENS else gconfig.top_k,
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": min(max(0, gconfig.min_new_tokens - len(tokens)), max_new_tokens),  # it refuses more
            "stop_token_ids": gconfig.stop_token_ids,
        }
        if address in self._takes_seeds:
            sampling["sampling_seed"] = seed
        if gconfig.stop:
            sampling["stop"] = gconfig.stop
        if gconfig.min_p:
            sampling["min_p"] = gconfig.min_p
        if ignore_eos:
            sampling["ignore_eos"] = True
        payload: Json = {"input_ids": [*prompt_ids(req), *tokens], "sampling_params": sampling}
        payload |= {"return_logprob": True, "stream": False}
        if gconfig.narrows and gconfig.top_k < ALL_TOKENS:  # kept sets must be bounded
            payload["return_sampling_mask"] = True  # before 0.5.23 ignored
        if req.image_data:
            payload["image_data"] = req.image_data
        return payload

    def _parse(self, reply: Json, max_tokens: int) -> Segment:
        tokens, meta_info = reply["output_ids"], reply["meta_info"]
        pairs = meta_info.get("output_token_logprobs") or []
        kept = meta_info.get("output_token_sampling_mask")
        finish, logprobs = meta_info["finish_reason"], [pair[0] for pair in pairs]
        if kept is not None:
            logprobs = meta_info["output_token_sampling_logprobs"]  # over the kept ids; the others are over all
        segment = Segment.checked(tokens, logprobs, finish["type"], max_tokens=max_tokens).with_kept(kept)
        segment = segment.with_stop(finish.get("matched"))
        require([pair[1] for pair in pairs] == tokens, "have the logprobs of its own tokens")
        whole = [{"version": meta_info.get("weight_version"), "start": 0, "end": len(tokens)}]
        segment = segment.with_versions(meta_info.get("weight_versions") or whole)
        stale = meta_info.get("stale_kv_tokens")  # only embedded servers report it
        require(stale is None or stale in range(len(tokens) + 1), "have at most as many stale_kv_tokens as tokens")
        segment = replace(segment, stale_kv_tokens=stale) if stale else segment
        return segment.kept_in_place() if self._pause_mode == "in_place" and stale is None else segment

    async def pause(self, server: ServerConnection) -> None:
        await server.request("POST", "/pause_generation", {"mode": self._pause_mode})

    async def resume(self, server: ServerConnection) -> None:
        await server.request("POST", "/continue_generation")

    async def _fall_asleep(self, server: ServerConnection) -> None:
        await self.pause(server)
        left_s = server.deadline - asyncio.get_running_loop().time()
        await server.request("POST", f"/flush_cache?timeout={max(0.0, left_s):.0f}")  # when nothing runs any more:
        await server.fetch("POST", "/release_memory_occupation", {"tags": ["kv_cache", "weights"]})  # else it ends

    async def _take_back(self, server: ServerConnection, part: Part) -> None:
        await server.fetch("POST", "/resume_memory_occupation", {"tags": [part]})

    async def load(self, server: ServerConnection, path: str, version: int, sent: Sent) -> list[str]:
        payload = {"model_path": path, "weight_version": str(version), "flush_cache": self._flushes_cache}
        return await self._verified(server, "/update_weights_from_disk", payload, sent)

    async def join(self, server: ServerConnection, place: Json, timeout_s: float) -> None:
        await server.request("POST", "/init_weights_update_group", place)

    async def leave(self, server: ServerConnection, groups: Sequence[str]) -> None:
        for group in groups:
            with contextlib.suppress(StatusError):  # it is in none of this name
                await server.request("POST", "/destroy_weights_update_group", {"group_name": group})

    async def begin(self, server: ServerConnection) -> None:
        try:
            await server.request("POST", "/begin_weight_update")
        except StatusError as error:
            if error.status == 404:
                return
            with contextlib.suppress(StatusError):
                await server.request("POST", "/end_weight_update")
            await server.request("POST", "/begin_weight_update")
        self._begun.add(server.address)

    async def receive(self, server: ServerConnection, buckets: Sequence[Bucket], version: int) -> None:
        # A call takes the tensors of one group, and holds all of them until they are loaded: one bucket at most.
        calls = [(group, specs) for bucket in buckets for group, specs in bucket.items()]
        for left, (group, specs) in zip(reversed(range(len(calls))), calls):
            payload = {
                "names": [spec.name for spec in specs],
                "dtypes": [spec.dtype for spec in specs],
                "shapes": [list(spec.shape) for spec in specs],
                "group_name": group,
                "flush_cache": left == 0 and self._flushes_cache,
                "weight_version": None if left else str(version),
            }
            await server.request("POST", "/update_weights_from_distributed", payload)

    async def end(self, server: ServerConnection, version: int, sent: Sent) -> list[str]:
        if server.address not in self._begun:
            return []
        self._begun.remove(server.address)
        return await self._verified(server, "/end_weight_update", {}, sent)

    async def _verified(self, server: ServerConnection, endpoint: str, payload: Json, sent: Sent) -> list[str]:
        """Let a server use new weights, verified if it can; return the tensors that it kept although they differ."""
        reply = await server.request("POST", endpoint, payload)
        if not are_names(names := reply.get("mismatched", [])):
            raise bad_reply(server.address, endpoint, "have a list of names as mismatched", reply)
        return names
