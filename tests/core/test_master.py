"""What a master refuses before anything starts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("ray")
from arealite.api.cli_args import PPOConfig, load_expr_config
from arealite.api.errors import ConfigError
from arealite.core.batch import Column, Pieces, RemoteBatch
from arealite.core.graph import MFC, DataFlowGraph
from arealite.core.group import Task
from arealite.core.master import Master
from arealite.core.records import CallLog, CallRecord
from arealite.core.sources import Episodes
from arealite.core.worker import Call, Outcome
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.utils.distributed import join_default_group, leave_default_group
from arealite.viewer.charts import charts

CONFIG = Path(__file__).parents[2] / "training" / "configs" / "sync-ppo.yaml"
KEYS = ("input_ids", "attention_mask")


def graph(*roles: str) -> DataFlowGraph:
    """Return one that trains these roles."""
    trained = [MFC(f"{role}_train", role, "train_step", FSDPPPOActor.ppo_update, KEYS) for role in roles]
    calls = [MFC("gen", "rollout", "generate", outputs=KEYS), *trained]
    return DataFlowGraph(calls, dict.fromkeys(roles, FSDPPPOActor), publishes="actor")


def load(*given: str) -> Any:
    return load_expr_config(["--config", str(CONFIG), *given], PPOConfig)[0]


def test_a_config_without_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workers must be given to a script of a master: got nothing\. Add `workers"):
        Master(load("workers=null"), graph("actor", "critic"))


class Trained:
    """An engine whose calls have ended, and its group."""

    def __init__(self) -> None:
        self.group = self

    def submit(self, call: Call) -> Task:
        task = Task(call, step=0)
        task.succeed([Outcome(value={"policy/loss": 0.5})], [])
        return task

    def wait(self, task: Task) -> Outcome:
        return task.values.result()[0]


def test_metrics_of_the_workflow_need_no_key_of_the_graph() -> None:
    """Two runs of one group, of which the first has two rows, and a run of another."""
    batch = TensorDict({"rewards": torch.tensor([1.0, 1.0, 0.0, 1.0])}, batch_size=[4])
    batch["sample_index"] = torch.tensor([0, 0, 1, 0])
    batch["num_turns"] = torch.tensor([2.0, 2.0, 1.0, 6.0])
    batch["rewards/format"] = torch.tensor([1.0, 1.0, 0.5, 0.0])
    source = Episodes.__new__(Episodes)
    source._scatter = lambda _: RemoteBatch([[0, 1, 2, 3]])
    join_default_group(60.0)
    try:
        remote = source._hand_out([batch[:3], batch[3:]])
    finally:
        leave_default_group()
    assert remote.metrics == {"workflow/num_turns": 3.0, "rewards/format": 0.5}

    master = Master(load(), graph("actor"))
    master.engines = {"actor": Trained()}
    remote.update(dict.fromkeys(KEYS, Column(Pieces([]), "")))
    assert master.run_graph(remote) == {"policy/loss": 0.5, "workflow/num_turns": 3.0, "rewards/format": 0.5}


class Ended:
    """Workers that have done a call."""

    groups = ()

    def take_records(self) -> list[CallRecord]:
        took = {"begin": 0.0, "end": 4.0, "moved_mib": 0.0, "attempt": 1, "machines": ()}
        return [CallRecord(step=0, call="actor_train", role="actor", group="actor", **took)]

    def metrics(self) -> dict[str, float]:
        return {}


def test_the_seconds_of_calls_are_no_parts_of_a_step_beside_those_in_which_they_ran(tmp_path: Path) -> None:
    master = Master(load(), graph("actor"))
    master.workers, master._log = Ended(), CallLog(tmp_path / "calls.jsonl")
    metrics = master._measure()
    assert metrics["core/actor_train_s"] == 4.0
    row = {"step": 0, "time/step_s": 6.0, "time/train_s": 5.0} | metrics
    (chart,) = [one for one in charts([row], staleness_bound=None) if one["title"] == "Time per step"]
    assert {trace["name"]: trace["y"] for trace in chart["traces"]} == {"train": [5.0], "other": [1.0]}
