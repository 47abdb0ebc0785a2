"""The Tinker API over HTTP, with real models and no servers: what it forgets, and what it repeats."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import tiny_models

from arealite.api.cli_args import LoRAConfig, OnlineConfig, OptimizerConfig, PPOActorConfig
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.tinker import api
from arealite.tinker.api import Command, TinkerApi
from arealite.tinker.models import Models
from arealite.tinker.serve import _run_next

KEY = "tml-key"


class Client:
    """Speaks as the SDK does."""

    def __init__(self, port: int, base: str) -> None:
        self._address, self._base = f"http://127.0.0.1:{port}/api/v1", base
        self.session = self.ask("create_session")["session_id"]

    def ask(self, endpoint: str, status: int = 200, **body: Any) -> Any:
        answer = requests.post(f"{self._address}/{endpoint}", json=body, headers={"X-API-Key": KEY}, timeout=60)
        assert answer.status_code == status, answer.text
        return answer.json()

    def result(self, endpoint: str, **body: Any) -> Any:
        return self.ask("retrieve_future", request_id=self.ask(endpoint, **body)["request_id"])

    def model(self) -> str:
        lora = {"rank": 4, "seed": 1}
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": self._base, "lora_config": lora}
        return str(self.result("create_model", **body)["model_id"])


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[int, str]]:
    base = tiny_models.save_qwen3(tmp_path / "base", seed=1)
    lora = LoRAConfig(rank=4)
    actor = FSDPPPOActor(PPOActorConfig(path=base, dtype="float32", optimizer=OptimizerConfig(), lora=lora))
    actor.initialize(None, None)
    models = Models(actor, None, tmp_path / "checkpoints", 64)  # type: ignore[arg-type]  # no server samples
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    served, is_over = TinkerApi(OnlineConfig(port=0), models, KEY, commands), threading.Event()

    def run() -> None:
        while not is_over.is_set():
            _run_next(models, commands)

    rank = threading.Thread(target=run)
    rank.start()
    yield served.port, base
    served.close()
    is_over.set()
    rank.join(60)
    actor.destroy()


def test_models_of_silent_sessions_make_room_for_others(
    place: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, beating = Client(*place), Client(*place)
    forgotten = silent.model()
    kept = beating.model()
    silent.ask("get_info", model_id=forgotten)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + api._SESSION_S + 1)
    monkeypatch.setattr(api, "time", later)
    beating.ask("session_heartbeat", session_id=beating.session)
    Client(*place).model()
    beating.ask("get_info", model_id=kept)
    assert "must be a model of an open session" in silent.ask("get_info", 404, model_id=forgotten)["error"]


def test_the_last_unnamed_checkpoints_of_samplers_are_kept(place: tuple[int, str], tmp_path: Path) -> None:
    client = Client(*place)
    model = client.model()
    client.result("save_weights_for_sampler", model_id=model, seq_id=1, path="named")
    saved = [client.result("save_weights_for_sampler", model_id=model, seq_id=2 + one)["path"] for one in range(18)]
    assert len(set(saved)) == 18
    there = {folder.name for folder in (tmp_path / "checkpoints" / model / "sampler_weights").iterdir()}
    assert there == {"named", *(path.rpartition("/")[2] for path in saved[2:])}
