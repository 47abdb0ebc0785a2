"""A checkpoint is the same whether its ranks run the loop or are called by a master."""

from __future__ import annotations

import random
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import testing_forks
import torch
import torch.distributed as dist
from recover_program import LENGTHS, SPEC, Counter, train
from training_cases import token_batch, train_config, write_model

from arealite.algorithms.logprobs import count_loss_tokens
from arealite.api.cli_args import RecoverConfig, SaverConfig
from arealite.api.errors import GroupLostError
from arealite.dataset.loader import PromptLoader
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.sft.lm_engine import sft_loss_fn
from arealite.trainer.recover import Recover
from arealite.trainer.saver import Saver
from arealite.utils import distributed, stop
from arealite.utils.files import is_locked


class RemoteEngine:
    """An engine whose ranks are other processes with a pipe each, as a master of one rank has it."""

    def __init__(self, ranks: list[testing_forks.Fork]) -> None:
        self._ranks = ranks
        self._calling = threading.Lock()  # a thread of the master writes checkpoints

    def on_all(self, *call: Any) -> list[Any]:
        """Call a method with plain values on every rank, and return what each returned."""
        with self._calling:
            for rank in self._ranks:
                rank.pipe.send(call)
            return [rank.receive() for rank in self._ranks]

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.on_all(name, *arguments)[0]

    @property
    def num_changes(self) -> int:
        return self.on_all("count_changes")[0]


def serve_rank(pipe: Connection, model: str) -> None:
    """Be one rank of a `RemoteEngine`, or of a script while it has none; None ends it."""
    torch.set_num_threads(1)
    engine = FSDPEngine(train_config(model, seed=3))

    def run_script(options: dict[str, Any]) -> dict[str, Any]:
        found = train(model, **options)
        return {key: found[key] for key in ("start", "losses", "draws")}

    def update(number: int, step: int) -> tuple[float, tuple[float, float]]:
        rows = list(range(dist.get_rank(), len(LENGTHS), dist.get_world_size()))
        metrics = engine.train_batch(token_batch(LENGTHS, seed=number)[rows], sft_loss_fn, count_loss_tokens)
        engine.step_lr_scheduler()
        engine.set_version(step + 1)
        return metrics["loss"], (random.random(), torch.rand(1).item())

    methods = {"run_script": run_script, "update": update, "count_changes": lambda: engine.num_changes}
    while (call := pipe.recv()) is not None:
        name, *arguments = call
        pipe.send((methods.get(name) or getattr(engine, name))(*arguments))


def train_as_master(engine: RemoteEngine, folder: Path, *, steps: int, trial_name: str) -> dict[str, Any]:
    """Do what `train` does, as the one rank of a master; draws are the ranks' and the master's own."""
    names = {"experiment_name": "e", "trial_name": trial_name, "fileroot": str(folder)}
    recover = Recover(RecoverConfig(**names, mode="auto", freq_steps=2), SPEC)
    loader, saver = PromptLoader([{"number": number} for number in range(40)], 4), Saver(SaverConfig(**names), SPEC)
    batches, rollout = iter(loader), Counter()
    found: dict[str, Any] = {"losses": {}, "draws": {}}
    with recover:
        start = found["start"] = recover.load(engine, loader, rollout=rollout, clocks={"saver": saver})  # type: ignore[arg-type]
        for step in range(start, steps):
            updates = engine.on_all("update", next(batches)[0]["number"], step)
            found["losses"][step] = updates[0][0]
            found["draws"][step] = [*(draws for _, draws in updates), random.random()]
            rollout.num_episodes += 6
            recover.save(step)
    return found


class Stopped:
    """An engine whose workers a cluster stops together with their master."""

    is_lost = False

    def get_version(self) -> int:
        return 1

    def keep_rng(self) -> None:
        """It has none."""

    @property
    def num_changes(self) -> int:
        if self.is_lost:
            raise GroupLostError("group actor must keep its workers: got rank 0 died")
        return 1


def test_a_master_that_is_stopped_with_its_workers_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = RecoverConfig(experiment_name="e", trial_name="t", fileroot=str(tmp_path), mode="auto", freq_steps=2)
    engine: Any = Stopped()
    distributed.join_default_group(testing_forks.DEADLINE_S)
    try:
        recover = Recover(config, SPEC)
        assert recover.load(engine, PromptLoader([{"number": 0}], 1)) == 0
        with pytest.raises(stop.RunStopped), recover:
            recover.save(0)
            engine.is_lost = True
            raise stop.stopped()  # as who waits for a batch does
        assert "step 0, the last one, has no checkpoint: group actor must keep its workers" in caplog.text
        assert not is_locked(tmp_path / "e" / "t" / ".trainer.lock")
    finally:
        distributed.leave_default_group()


def test_a_master_whose_engine_has_its_ranks_elsewhere(tmp_path: Path) -> None:
    """It leaves the same checkpoint as a script on as many ranks, and either continues what the other began."""
    model = write_model(tmp_path / "model")
    script, whole = ({"folder": tmp_path, "trial_name": name} for name in ("script", "whole"))
    with testing_forks.two_ranks(serve_rank, model) as ranks:
        engine = RemoteEngine(ranks)
        engine.run_script(script | {"steps": 5, "interrupt_in": 3})
        expected = engine.on_all("run_script", whole | {"steps": 5})
        distributed.join_default_group(testing_forks.DEADLINE_S)
        engine.initialize(None, SPEC)
        train_as_master(engine, tmp_path, steps=2, trial_name="master")
        of_master, of_script = (tmp_path / f"e/{name}/recover/step_1" for name in ("master", "script"))
        for name in (f"actor/{file}" for rank in (0, 1) for file in (f"__{rank}_0.distcp", f"rng_{rank}.json")):
            assert (of_master / name).read_bytes() == (of_script / name).read_bytes(), name
        next_draw = random.random()

        found = train_as_master(engine, tmp_path, steps=5, trial_name="script")
        assert found["start"] == 3
        for step in (3, 4):
            assert found["losses"][step] == expected[0]["losses"][step]
            assert found["draws"][step][:2] == [rank["draws"][step] for rank in expected]
        assert found["draws"][3][2] == expected[0]["draws"][3][0], "rank 0 of the script was its master"
        engine.destroy()
        distributed.leave_default_group()

        resumed = engine.on_all("run_script", script | {"trial_name": "master", "steps": 4})
        for rank, found in enumerate(resumed):
            assert found["start"] == 2
            assert found["losses"] == {step: expected[rank]["losses"][step] for step in (2, 3)}
        assert resumed[0]["draws"][2][0] == next_draw, "as the master would have drawn"
        assert resumed[1]["draws"][2] == expected[1]["draws"][2]
        for rank in ranks:
            rank.pipe.send(None)
        assert [rank.end() for rank in ranks] == [0, 0]
