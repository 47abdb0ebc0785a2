"""One running server as a check sees it: clients, a trainer that publishes real weights, and references for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arealite.api.cli_args import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    OptimizerConfig,
    PPOActorConfig,
)
from arealite.api.io_struct import FinetuneSpec, ModelRequest, ModelResponse, SaveLoadMeta
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.weights.publish import publish_weights
from servers.models import Reference, Scored, write_model
from servers.programs import COLOCATED, CONTEXT, Program

_UPDATE_S = 180.0
_REQUEST_S = 180.0


class Laboratory:
    """What all servers are held against: two models, their references, and a trainer that can hold either."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = {name: write_model(folder / name, seed=seed, max_position=CONTEXT) for name, seed in _SEEDS}
        self.references = {name: Reference(path) for name, path in self.models.items()}
        self.actor = FSDPPPOActor(
            PPOActorConfig(path=str(self.models["first"]), dtype="float32", optimizer=OptimizerConfig())
        )
        self.actor.initialize(None, FinetuneSpec(1, 10, 1))

    def close(self) -> None:
        """Free the trainer."""
        self.actor.destroy()


_SEEDS = (("first", 1), ("second", 2))


@dataclass
class Subject:
    """A server under test and the history of its weights."""

    program: Program
    address: str
    laboratory: Laboratory
    history: list[str] = field(default_factory=lambda: ["first"])
    """Which model each version was; the last one is what the server holds."""
    num_updates: int = 0
    num_interrupts: int = 0

    @property
    def version(self) -> int:
        return len(self.history) - 1

    @property
    def other(self) -> str:
        """Name the model that the server does not hold."""
        return "first" if self.history[-1] == "second" else "second"

    @contextlib.contextmanager
    def client(self, **config: Any) -> Iterator[RemoteInferenceEngine]:
        """Connect a client that knows the server's version."""
        defaults: dict[str, Any] = {
            "backend": self.program.backend,
            "server_addrs": [self.address],
            "experiment_name": "servers",
            "trial_name": self.program.name,
            "fileroot": str(self.laboratory.folder),
            "tokenizer_path": str(self.laboratory.models["first"]),
            "weight_update_timeout": _UPDATE_S,
            "request_timeout": _REQUEST_S,
            "request_retries": 0,
            "setup_timeout": 180,
        }
        engine = self.program.client(InferenceEngineConfig(**defaults | config))
        engine.colocated = COLOCATED.get(self.address)
        engine.set_version(self.version)
        engine.initialize(None, None)
        try:
            yield engine
        finally:
            engine.colocated = None  # it outlives the client
            engine.destroy()

    def publish(self, engine: RemoteInferenceEngine, model: str) -> None:
        """Let the trainer hold a model and give it to the server as the next version."""
        self.hold(model)
        publish_weights(self.laboratory.actor, engine, version=self.version + 1)
        self.history.append(model)
        self.num_updates += 1

    def hold(self, model: str) -> None:
        """Load a model into the trainer."""
        self.laboratory.actor.load(SaveLoadMeta(str(self.laboratory.models[model])))

    def complete(self, engine: RemoteInferenceEngine, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Sample all requests at once."""
        responses = asyncio.run(_gather(engine, requests))
        self.num_interrupts += sum(response.num_interrupts for response in responses)
        return responses

    def score(self, responses: Sequence[ModelResponse], model: str | None = None) -> list[Scored]:
        """Hold responses against a model, by default the one that the server holds."""
        reference = self.laboratory.references[model or self.history[-1]]
        return [reference.score(response) for response in responses]

    def sample(self, count: int, length: int = 32, **gconfig: Any) -> list[Scored]:
        """Sample `count` prompts from a fresh client and score them."""
        with self.client() as engine:
            return self.score(self.complete(engine, requests(count, length, **gconfig)))


class Flight:
    """Requests on their way in a thread."""

    def __init__(self, subject: Subject, engine: RemoteInferenceEngine, batch: Sequence[ModelRequest]) -> None:
        self._outcome: list[list[ModelResponse]] = []
        self._failure: list[BaseException] = []
        self.started = time.monotonic()

        def run() -> None:
            try:
                self._outcome.append(subject.complete(engine, batch))
            except BaseException as error:
                self._failure.append(error)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def land(self) -> list[ModelResponse]:
        """Wait for all responses."""
        self._thread.join(2 * _REQUEST_S)
        if self._failure:
            raise self._failure[0]
        assert self._outcome, f"requests must end within {2 * _REQUEST_S:g} s: they did not"
        return self._outcome[0]


def requests(count: int, length: int, **gconfig: Any) -> list[ModelRequest]:
    """Return `count` requests with prompts of 1 to 96 tokens."""
    sampling = GenerationHyperparameters(max_new_tokens=length, **gconfig)
    return [ModelRequest(prompt(index, 1 + 37 * index % 96), sampling) for index in range(count)]


def prompt(number: int, length: int) -> list[int]:
    """Return token ids that differ from number to number, none of them special."""
    return [5 + (31 * number + 7 * index + index * index // 3) % 250 for index in range(length)]


async def _gather(engine: RemoteInferenceEngine, batch: Sequence[ModelRequest]) -> list[ModelResponse]:
    return list(await asyncio.gather(*(engine.agenerate(request) for request in batch)))
