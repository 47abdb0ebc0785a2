"""vLLM with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out, as `arealite.launcher.serve.vllm_server` starts it. Any such
server loads weights from a folder; broadcasts need the worker extension of our wrapper
(`arealite.launcher.serve.vllm_weights`)."""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from arealite.api.config.rollout import ALL_TOKENS
from arealite.api.errors import ConfigError, ServerError
from arealite.api.io_struct import ModelRequest
from arealite.api.servers import PauseMode
from arealite.inference.backends.base import (
    Backend,
    Bucket,
    MismatchError,
    Part,
    Segment,
    Sent,
    are_names,
    described,
    prompt_ids,
    require,
)
from arealite.inference.http import Json, ServerConnection, bad_reply, deadline_in
from arealite.inference.pool import ServerFacts

_OUR_EXTENSION = "arealite"  # name of the weight transfer of our wrapper
_ABANDON_S = 10.0  # time for a server to restore its old weights, also after the deadline of an update
_PAUSES = {"abort": "abort", "retract": "keep", "in_place": "keep&clear_cache=false", "wait": "wait"}


class VLLMBackend(Backend):
    """The protocol of vLLM."""

    program, endpoint = "vLLM", "/inference/v1/generate"
    overflow = re.compile("maximum context length|maximum model length|max_tokens must be at least 1, got 0")
    verifies = frozenset({"nccl"})
    receives_at_once = True
    takes_partial = frozenset({"nccl"})  # from a folder only a new vLLM would, and complain of every layer

    def __init__(self, *, pause_mode: PauseMode, accepts_mismatch: bool = False) -> None:
        super().__init__(pause_mode=pause_mode, accepts_mismatch=accepts_mismatch)
        self._returns_kept: set[str] = set()  # addresses of servers with --return-sampling-mask
        self._extended: set[str] = set()  # addresses of servers that our launch wrapper has started

    async def _inspect(self, server: ServerConnection) -> ServerFacts:
        paths = (await server.request("GET", "/openapi.json"))["paths"].keys()
        if missing := {self.endpoint, "/pause"} - paths:
            raise ServerError(
                f"http://{server.address} must be a vLLM server with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out: it "
                f"has no {' '.join(sorted(missing))}. Start it by `arealite serve`."
            )
        config: dict[str, Any] = (await server.request("GET", "/server_info?config_format=json"))["vllm_config"]
        if (mode := config["model_config"]["logprobs_mode"]) != "processed_logprobs":
            raise ConfigError(
                f"vLLM must return logprobs of what it samples from: got {mode} at {server.address}, which are those "
                "before temperature, top-p and top-k. Start it with --logprobs-mode processed_logprobs."
            )
        if config["cache_config"]["enable_prefix_caching"]:
            self._refuse_cache(server, "--no-enable-prefix-caching")
        if config["model_config"].get("return_sampling_mask"):
            self._returns_kept.add(server.address)
        transfer, parallel = config["weight_transfer_config"], config["parallel_config"]
        if transfer is not None and transfer["backend"] == _OUR_EXTENSION:
            self._extended.add(server.address)
        return ServerFacts(
            dtype=str(config["model_config"]["dtype"]).removeprefix("torch."),
            num_gpus=parallel["world_size"] * parallel["data_parallel_size"],
            takes_broadcasts=server.address in self._extended,
            model=config["model_config"].get("model"),
        )

    async def take_over(self, server: ServerConnection) -> None:
        if server.address in self._extended:
            await _call_workers(server, "abandon_weight_update")
        await self.resume(server)

    def payload(self, address: str, req: ModelRequest, tokens: list[int], seed: int, ignore_eos: bool = False) -> Json:
        gconfig = req.gconfig
        sampling: Json = {  # all of it, because vLLM takes defaults from the model's generation_config.json
            "max_tokens": gconfig.max_new_tokens - len(tokens),
            "min_tokens": max(0, gconfig.min_new_tokens - len(tokens)),
            "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
            "top_p": gconfig.top_p,
            "top_k": -1 if gconfig.top_k >= ALL_TOKENS else gconfig.top_k,
            "min_p": 0.0 if gconfig.greedy else gconfig.min_p,
            "repetition_penalty": 1.0,
            "stop": gconfig.stop,
            "skip_special_tokens": False,  # a stop string may be the text of one
            "stop_token_ids": gconfig.stop_token_ids,
            "ignore_eos": ignore_eos,
            "seed": (seed + len(tokens)) % 2**63,  # the same one would draw the same numbers for the continuation
            "logprobs": 0,  # only those of the sampled tokens
        }
        if address in self._returns_kept and gconfig.greedy:  # it takes neither temperature 0 nor all tokens
            sampling |= {"temperature": 1.0, "top_k": 1}
        elif address in self._returns_kept:
            sampling["top_k"] = gconfig.top_k
        payload: Json = {"token_ids": [*prompt_ids(req), *tokens], "sampling_params": sampling}
        images = [{"type": "image_url", "url": f"data:image/png;base64,{one}"} for one in req.image_data]
        return payload | ({"content_parts": images} if images else {})

    def _parse(self, reply: Json, max_tokens: int) -> Segment:
        (choice,) = reply["choices"]
        tokens, spans = choice["token_ids"], choice.get("weight_versions")
        content = (choice["logprobs"] or {}).get("content") or []
        require([one["token_id"] for one in content] == tokens, "have the logprobs of its own tokens")
        logprobs = [one["logprob"] for one in content]
        segment = Segment.checked(tokens, logprobs, choice["finish_reason"], max_tokens=max_tokens)
        segment = segment.with_kept(choice.get("sampling_mask")).with_stop(choice.get("stop_reason"))
        if spans is None:
            continues = self._pause_mode in ("retract", "in_place")
            require(not continues, "have weight_versions, as rollout.pause_mode needs")
            return segment
        segment = segment.with_versions(spans)
        return segment.kept_in_place() if self._pause_mode == "in_place" else segment

    async def pause(self, server: ServerConnection) -> None:
        await server.request("POST", f"/pause?mode={_PAUSES[self._pause_mode]}")

    async def resume(self, server: ServerConnection) -> None:
        await server.request("POST", "/resume")

    async def _fall_asleep(self, server: ServerConnection) -> None:
        await server.request("POST", "/sleep?level=2&mode=abort")  # keeps no copy of the weights

    async def _take_back(self, server: ServerConnection, part: Part) -> None:
        await server.request("POST", f"/wake_up?tags={part}")

    async def load(self, server: ServerConnection, path: str, version: int, sent: Sent) -> list[str]:
        try:
            await _call_workers(server, "reload_weights", weights_path=path)
        except ServerError:
            if server.address in self._extended:
                with contextlib.suppress(ServerError):
                    soon = replace(server, deadline=deadline_in(_ABANDON_S))
                    await _call_workers(soon, "abandon_weight_update")
            raise
        await server.request("POST", "/update_weight_version", {"new_version": str(version)})
        await self._forget_cache(server)
        return []

    async def join(self, server: ServerConnection, place: Json, timeout_s: float) -> None:
        init_info = place | {"timeout_s": timeout_s}
        await server.request("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    async def leave(self, server: ServerConnection, groups: Sequence[str]) -> None:
        await _call_workers(server, "abandon_weight_update")
        await server.request("POST", "/shutdown_weight_transfer_engine")

    async def begin(self, server: ServerConnection) -> None:
        await _call_workers(server, "abandon_weight_update")
        await server.request("POST", "/start_weight_update")

    async def receive(self, server: ServerConnection, buckets: Sequence[Bucket], version: int) -> None:
        await server.request("POST", "/update_weights", {"update_info": described(buckets)})

    async def end(self, server: ServerConnection, version: int, sent: Sent) -> list[str]:
        differing: list[str] = []
        if sent.fingerprints:
            fingerprints = dict(sent.fingerprints)
            by_worker = await _call_workers(server, "mismatched_weights", fingerprints=fingerprints)
            if not all(map(are_names, by_worker)):  # a worker replied to an earlier call
                raise ServerError(
                    f"every worker of {server.address} must reply with a list of names: got {by_worker}. A call that "
                    "failed on one of them has put them out of step; restart the server."
                )
            differing = sorted({name for names in by_worker for name in names})
            if differing and not self._accepts_mismatch:
                raise MismatchError(
                    f"tensors must arrive at {server.address} as they were sent: got {len(differing)} of "
                    f"{len(fingerprints)} with other fingerprints, {', '.join(differing[:5])}. Send them again."
                )
        await server.request("POST", "/finish_weight_update", {"weight_version": str(version)})
        await self._forget_cache(server)
        return differing

    async def _forget_cache(self, server: ServerConnection) -> None:
        """Drop the keys and values of old weights; with `in_place` there is no prefix cache."""
        if self._pause_mode != "in_place":
            await server.request("POST", "/reset_prefix_cache")


async def _call_workers(server: ServerConnection, method: str, **arguments: object) -> list[Any]:
    """Call a method of every worker of a server and return their results."""
    reply = await server.request("POST", "/collective_rpc", {"method": method, "kwargs": arguments})
    results = reply.get("results")
    if not isinstance(results, list):
        raise bad_reply(server.address, f"/collective_rpc {method}", "have results", reply)
    return results
