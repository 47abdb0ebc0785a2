"""Writes down what a real server answers, so that the tests of our backends need no server.

Requests for completions are those that our backends make. Of long answers only what we read is kept, and folders of
this machine are replaced.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from harness.wire import Answer, ask
from transformers import AutoTokenizer

from arealite.api.io_struct import ModelRequest
from arealite.inference.backends.base import Backend, PauseMode
from arealite.inference.backends.sglang import SGLangBackend
from arealite.inference.backends.vllm import VLLMBackend
from arealite.inference.http import ServerConnection, deadline_in, open_session
from servers.models import end_ids, write_model
from servers.programs import CONTEXT, Program, served
from servers.subject import prompt, requests

SEED = 1
"""Of the model that the recorded servers hold; version 1 is that of the next one."""
FLIGHT = 160
"""Tokens asked for in completions that are interrupted."""
_FOLDER = "/models"
_IN_FLIGHT_S = 0.2
_TIMEOUT_S = 60.0

Json = dict[str, Any]


def new_backend(program: str, pause_mode: PauseMode = "abort") -> Backend:
    """Return the backend of a program."""
    if program == "vllm":
        return VLLMBackend(pause_mode=pause_mode)
    return SGLangBackend(pause_mode=pause_mode)


def record(program: Program, folder: Path, out: Path) -> Path:
    """Start a server, ask it everything, and return the file of its answers."""
    models = [write_model(folder / f"model-{seed}", seed=seed, max_position=CONTEXT) for seed in (SEED, SEED + 1)]
    about = program.about(models[0])
    with served(program, models[0], folder / "server.log") as address:
        recorder = Recorder(program.name, address)
        recorder.ask_everything(*models)
    path = out / f"{about['program']}-{about['version']}.json"
    lines = ",\n".join(
        json.dumps(one, separators=(",", ":")).replace(str(folder), _FOLDER) for one in recorder.exchanges
    )
    head = json.dumps({"program": about["program"], "version": about["version"], "end_ids": end_ids(models[0])})
    path.write_text(f'{head[:-1]}, "exchanges": [\n{lines}\n]}}\n')
    return path


class Recorder:
    """Asks one server and remembers."""

    def __init__(self, program: str, address: str) -> None:
        self.exchanges: list[Json] = []
        self._program = program
        self._address = address
        self._backend = new_backend(program)

    def ask_everything(self, model: Path, next_model: Path) -> None:
        """Go through all cases: the server holds one model, and gets the next."""
        self._meet()
        greedy = self._complete("greedy", 16)
        tokens = greedy.get("output_ids") or greedy["choices"][0]["token_ids"]
        self._complete("sampled", 16, greedy=False)
        self._complete("top_k", 16, greedy=False, top_k=1)
        if self._program != "vllm":  # which returns kept sets on GPUs only
            self._complete("kept sets", 16, greedy=False, top_p=0.9, top_k=20)
        self._complete("stop id", 16, stop_token_ids=[tokens[5]])
        self._complete("stop string", 16, stop=[_letter_of(tokens, model)])
        self._complete("min tokens", 8, stop_token_ids=[tokens[5]], min_new_tokens=8)
        self._until_stopped(end_ids(model))
        self._complete("overflow", 16, request=prompt(1, CONTEXT + 50))
        self._complete("temperature below 0", 16, change={"temperature": -1.0})
        self._ask("unknown endpoint", "POST", "/no_such_endpoint", {})
        self._in_flight("aborted", "abort", lambda backend, caller: asyncio.sleep(0))
        self._update_calls(str(next_model))
        self._in_flight("split", "retract", lambda backend, caller: backend.load(caller, str(next_model), 2, {}))

    def _meet(self) -> None:
        if self._program == "vllm":
            self._ask("meet", "GET", "/openapi.json", None, lambda body: {"paths": {key: {} for key in body["paths"]}})
            self._ask("meet", "GET", "/server_info?config_format=json", None, _vllm_info)
        else:
            self._ask("meet", "GET", "/get_model_info", None)
            self._ask("meet", "GET", "/get_server_info", None, _sglang_info)
        asyncio.run(self._with_caller(self._backend, lambda backend, caller: backend.meet(caller)))

    def _until_stopped(self, ends: list[int]) -> None:
        """Sample hotly until the model ends a completion itself."""
        for seed in range(100):
            body = self._complete("end token", 64, seed=seed, greedy=False, temperature=2.0)
            sampled = body.get("output_ids") or body["choices"][0]["token_ids"]
            if sampled[-1] in ends:
                return
            self.exchanges.pop()
        raise RuntimeError("none of 100 completions ended by itself")

    def _update_calls(self, next_model: str) -> None:
        """Update from disk, call by call, and make the mistakes of an update by broadcast."""
        if self._program == "vllm":
            self._ask("update without begin", "POST", "/finish_weight_update", {"weight_version": "1"})
            calls: list[tuple[str, Json]] = [
                ("/pause?mode=abort", {}),
                ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": next_model}}),
                ("/update_weight_version", {"new_version": "1"}),
                ("/reset_prefix_cache", {}),
                ("/resume", {}),
            ]
        else:
            bucket = {"names": [], "dtypes": [], "shapes": [], "group_name": "none", "weight_version": "1"}
            self._ask("update without begin", "POST", "/update_weights_from_distributed", bucket)
            calls = [
                ("/pause_generation", {"mode": "abort"}),
                ("/update_weights_from_disk", {"model_path": next_model, "weight_version": "1", "flush_cache": True}),
                ("/continue_generation", {}),
            ]
        for endpoint, payload in calls:
            self._ask("update from disk", "POST", endpoint, payload)
        self._complete("greedy after the update", 16)

    def _in_flight(
        self, case: str, mode: PauseMode, action: Callable[[Backend, ServerConnection], Coroutine[Any, Any, object]]
    ) -> None:
        """Pause the server while it samples, do something, and let it go on."""
        thread = threading.Thread(target=self._complete, args=(case, FLIGHT))
        thread.start()
        time.sleep(_IN_FLIGHT_S)

        async def interrupt(backend: Backend, caller: ServerConnection) -> None:
            await backend.pause(caller)
            await action(backend, caller)
            await backend.resume(caller)

        asyncio.run(self._with_caller(new_backend(self._program, mode), interrupt))
        thread.join(_TIMEOUT_S)

    async def _with_caller(
        self, backend: Backend, action: Callable[[Backend, ServerConnection], Coroutine[Any, Any, object]]
    ) -> None:
        async with open_session() as session:
            await action(backend, ServerConnection(session, self._address, deadline_in(_TIMEOUT_S)))

    def _complete(
        self,
        case: str,
        length: int,
        *,
        seed: int = 7,
        request: list[int] | None = None,
        change: Json | None = None,
        **gconfig: Any,
    ) -> Json:
        """Ask for a completion as our client does, with `change` in its sampling parameters."""
        sampling = requests(1, length, **{"greedy": True, **gconfig})[0].gconfig
        asked = ModelRequest(request or prompt(3, 12), sampling)
        endpoint = self._backend.endpoint
        payload = self._backend.payload(self._address, asked, [], seed)
        payload.get("sampling_params", payload).update(change or {})
        body: Json = self._ask(case, "POST", endpoint, payload).body
        return body

    def _ask(
        self, case: str, method: str, endpoint: str, payload: Json | None, shorten: Callable[[Any], Any] | None = None
    ) -> Answer:
        answer = ask(self._address, method, endpoint, payload, timeout_s=_TIMEOUT_S)
        body = shorten(answer.body) if shorten else answer.body
        exchange = {"case": case, "method": method, "endpoint": endpoint, "payload": payload}
        self.exchanges.append(exchange | {"status": answer.status, "body": body})
        return answer


def _letter_of(tokens: list[int], model: Path) -> str:
    """Return a letter that a completion comes to after a few tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    letters = [tokenizer.decode([token]) for token in tokens]
    return next(
        one for at, one in enumerate(letters) if at and len(one) == 1 and one.isascii() and one not in letters[:at]
    )


def _vllm_info(body: Json) -> Json:
    config = body["vllm_config"]
    return {
        "vllm_config": {
            "model_config": {name: config["model_config"][name] for name in ("dtype", "logprobs_mode")},
            "cache_config": {"enable_prefix_caching": config["cache_config"]["enable_prefix_caching"]},
            "parallel_config": {name: config["parallel_config"][name] for name in ("world_size", "data_parallel_size")},
            "weight_transfer_config": config["weight_transfer_config"],
        }
    }


def _sglang_info(body: Json) -> Json:
    names = ("version", "dtype", "tp_size", "context_length", "max_req_input_len", "disable_radix_cache")
    names += ("enable_deterministic_inference",)
    return {name: body[name] for name in names}
