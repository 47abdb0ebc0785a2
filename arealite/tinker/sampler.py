"""Samples from checkpoints of many models by servers that have the weights of one."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tinker import types

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.io_struct import ModelRequest, ModelResponse
from arealite.inference.remote_engine import RemoteInferenceEngine

BASE = ""
"""In place of the path of a checkpoint: the base model, without adapters."""


class Sampler:
    """Samples from one checkpoint after the other. Requests begin in the order in which they came: one for another
    checkpoint waits for all before it to end, and those behind it wait, too."""

    def __init__(self, rollout: RemoteInferenceEngine, run: Callable[..., Awaitable[Any]]) -> None:
        self._rollout, self._run = rollout, run
        self._path, self._version, self._num_running = BASE, 0, 0  # the base model is published at the start
        self._turn, self._idle = asyncio.Lock(), asyncio.Event()  # a lock is given in order
        self._idle.set()

    async def sample(self, path: str, requests: list[ModelRequest]) -> list[ModelResponse]:
        async with self._turn:
            if path != self._path:
                await self._idle.wait()
                await self._run("publish", path=path, version=self._version + 1)
                self._path, self._version = path, self._version + 1
            self._num_running += 1
            self._idle.clear()
            version = self._version
        try:
            answers = await asyncio.gather(*(self._rollout.agenerate(one) for one in requests))
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._idle.set()
        versions = {version for answer in answers for version in answer.output_versions}
        if versions - {version}:
            raise RuntimeError(f"samples must be of weights {version}: got {sorted(versions)}. Sample again.")
        return answers


def sampling_of(params: types.SamplingParams, room: int) -> GenerationHyperparameters:
    """Return how to sample where there is room for so many tokens; ValueError for what can't be."""
    if room < 1:
        raise ValueError(f"prompt must leave room for a token: got {1 - room} tokens too many. Shorten it.")
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    if stop is not None and not stop:
        raise ValueError("stop must be left out or name something: got an empty list, which is not implemented.")
    return GenerationHyperparameters(
        max_new_tokens=min(room, room if params.max_tokens is None else params.max_tokens),
        greedy=params.temperature == 0,
        temperature=params.temperature or 1.0,
        top_p=params.top_p,
        **({} if params.top_k < 0 else {"top_k": params.top_k}),
        stop=[one for one in stop or () if isinstance(one, str)],
        stop_token_ids=[one for one in stop or () if not isinstance(one, str)],
    )
