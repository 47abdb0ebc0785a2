"""The verdict on a step, by hand."""

import functools
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import tiny_models
import torch
from testing_client import in_loop
from testing_lite import LiteServer
from testing_metrics import undocumented
from testing_server import serve
from transformers import AutoModelForCausalLM

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, StatsLoggerConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.dataset.loader import PromptLoader
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.trainer.stats_logger import StatsLogger
from arealite.trainer.step_line import StepLine, bounds, verdict
from arealite.workflow.rlvr import RLVRWorkflow

ROW = {"time/step_s": 10.0, "time/rollout_s": 2.0, "time/logprobs_s": 1.0, "time/update_s": 5.0, "time/weights_s": 1.0}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "trainer-bound 70 %: update"),
        ({"time/update_s": 0.5}, "trainer-bound 70 %: other"),
        ({"time/rollout_s": 8.0, "time/update_s": 0.0}, "rollout-bound 80 %"),
        ({"time/rollout_s": 8.0, "wait/servers_s": 7.0}, "rollout-bound 80 %: servers"),
        (
            {"time/rollout_s": 8.0, "wait/servers_s": 3.0, "wait/servers_full_s": 4.0},
            "rollout-bound 80 %: servers full",
        ),
        ({"time/rollout_s": 8.0, "wait/servers_s": 2.0, "wait/reward_s": 6.0}, "reward-bound 60 %"),
        ({"time/rollout_s": 8.0, "wait/workflow_s": 8.0}, "workflow-bound 80 %"),
        ({"time/weights_s": 6.0, "time/update_s": 0.5}, "weights-bound 60 %"),
        ({"time/rollout_s": 6.0, "wait/reward_s": 40.0, "wait/workflow_s": 20.0}, "reward-bound 40 %"),
        ({"time/rollout_s": 15.0, "time/weights_s": 5.0}, "rollout-bound 75 %"),
    ],
)
def test_the_party_with_most_of_the_step_bounds_it(changes: dict[str, float], told: str) -> None:
    row = ROW | changes
    shares = bounds(row)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert verdict(row | shares) == told
    assert StepLine(total_steps=9, staleness_bound=1, width=200).render(1, row | shares).endswith(f" | {told}")


def test_a_step_without_rollouts_has_none() -> None:
    assert bounds({"time/step_s": 1.0, "time/train_s": 1.0}) == {} and verdict({"time/step_s": 1.0}) is None


def slow(completions: str, **others: object) -> float:
    time.sleep(1.0)
    return 1.0


def quick(completions: str, **others: object) -> float:
    return 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return tiny_models.save_qwen3(tmp_path_factory.mktemp("model"), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "num_slots", "updates_per_rollout", "told"),
    [
        pytest.param(slow, 32, 0.0, "reward-bound .*%", marks=pytest.mark.long),
        pytest.param(quick, 1, 0.0, "rollout-bound .*: servers full", marks=pytest.mark.long),
        (quick, 32, 0.0, "rollout-bound .*: servers"),
        (quick, 32, 3.0, "trainer-bound .*: update"),
    ],
)
def test_a_run_that_is_made_so_is_told_so(
    model: str, tmp_path: Path, reward: Callable[..., float], num_slots: int, updates_per_rollout: float,
    told: str, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A real server, real reward workers and the loop's own logger; only the update is a sleep, of some rollouts."""
    gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=60, min_new_tokens=60)
    config = InferenceEngineConfig(backend="lite", consumer_batch_size=2, request_retries=0)
    with ExitStack() as stack:
        server = stack.enter_context(serve(LiteServer(AutoModelForCausalLM.from_pretrained(model), slots=num_slots)))
        workflow = RLVRWorkflow(reward, gconfig, tiny_models.tokenizer(), num_reward_workers=1)
        stack.callback(workflow.close)
        rollout = RemoteInferenceEngine(config.new(server_addrs=[server.address]))
        rollout.initialize(None, None)
        stack.callback(rollout.destroy)
        loader = PromptLoader([{"messages": [{"role": "user", "content": "an"}]}] * 8, 2)
        stats = StatsLogger(
            StatsLoggerConfig(experiment_name="e", trial_name="t", fileroot=str(tmp_path)), FinetuneSpec(1, 8, 2)
        )
        for step in range(2):  # workers and server start in the first
            began = time.monotonic()
            with stats.timer("rollout"):
                rollout.prepare_batch(loader, workflow)
            rollout_s = time.monotonic() - began
            with stats.timer("update"):
                time.sleep(updates_per_rollout * rollout_s)
            rollout.set_version(step + 1)
            server.engine.update_weights({}, str(step + 1), is_partial=True).result()
            in_loop(rollout, functools.partial(rollout.servers.advance, rollout.servers.servers, step + 1))
            stats.add(rollout.metrics())
            row = stats.commit(step)
        stats.close()
    assert re.search(rf"\| {told}$", capsys.readouterr().out.splitlines()[1])
    waits_s = sum(row[key] for key in row if key.startswith("wait/"))
    assert 0.8 * row["time/rollout_s"] < waits_s <= row["time/rollout_s"]
    assert undocumented(row) == set()
