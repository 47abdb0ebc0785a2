"""What is learned from a run, or estimated for a GPU: constants that are known, and lengths."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest
from testing_simulated import SERVER, write_simulated

from arealite.api.cli_args import GRPOConfig
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.planner.cost import scenario
from arealite.planner.scenario import GroupLengths, Scenario
from arealite.simulate.run import simulate
from arealite.simulate.workload import _fitted, learned, least_squares, measured


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, GRPOConfig, float]:
    return write_simulated(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def costs(simulated: tuple[RunFolder, GRPOConfig, float]) -> Scenario:
    return learned(simulated[0], simulated[1], seed=1)


def test_constants_of_a_run_are_found_again(costs: Scenario) -> None:
    """Those of a decode step are nearly collinear in one run, and take each other's place: steps come out right."""
    server = costs.server
    assert server.step_s == pytest.approx(SERVER.step_s, rel=0.2)
    assert server.sequence_s == pytest.approx(SERVER.sequence_s, rel=0.4)
    assert (costs.train_s, costs.train_token_s) == (pytest.approx(0.0, abs=1e-9), pytest.approx(1e-3, rel=0.01))
    assert (costs.publish_s, server.swap_s) == (pytest.approx(0.2, abs=0.01), pytest.approx(0.1))
    assert costs.reward_s == pytest.approx(0.05, abs=0.005)
    assert (server.slots, costs.prompt) == (64, 8)


def test_a_run_predicts_its_own_steps(simulated: tuple[RunFolder, GRPOConfig, float], costs: Scenario) -> None:
    run, config, step_s = simulated
    result = simulate(scenario(config, costs, steps=40, warm_up=4, seed=1))
    assert result.seconds / 40 == pytest.approx(step_s, rel=0.06)
    assert measured(run)[0]["step_s"] == pytest.approx(step_s, rel=0.02)


def test_simulated_completions_are_groups_of_the_run(
    simulated: tuple[RunFolder, GRPOConfig, float], costs: Scenario
) -> None:
    database = sqlite3.connect(simulated[0].ledger)
    rows = database.execute("SELECT ticket, tokens FROM samples ORDER BY ticket, sample").fetchall()
    groups = {tuple(tokens for one, tokens in rows if one == ticket) for ticket, _ in rows}
    lengths = costs.lengths
    found = {tuple(lengths(prompt, sample) for sample in range(4)) for prompt in range(300)}
    assert found <= groups and len(found) > len(groups) / 2


def test_lengths_depend_on_seed_prompt_and_sample_only() -> None:
    lengths = GroupLengths([1, 2, 10, 20, 100, 200], 2)
    first = [[lengths(prompt, sample) for sample in range(2)] for prompt in range(20)]
    assert first == [[lengths(prompt, sample) for sample in (0, 1)] for prompt in range(20)]
    assert {tuple(group) for group in first} == {(1, 2), (10, 20), (100, 200)}
    assert first != [[GroupLengths([1, 2, 10, 20, 100, 200], 2, seed=2)(prompt, 0)] for prompt in range(20)]


def test_a_larger_group_goes_on_with_the_next_one() -> None:
    lengths = GroupLengths([1, 2, 10, 20], 2)
    assert {tuple(lengths(prompt, sample) for sample in range(3)) for prompt in range(20)} == {(1, 2, 10), (10, 20, 1)}


def test_a_config_gives_what_its_run_would_do(simulated: tuple[RunFolder, GRPOConfig, float], costs: Scenario) -> None:
    config = simulated[1].new(
        gconfig=simulated[1].gconfig.new(max_new_tokens=1024, n_samples=8),
        rollout=simulated[1].rollout.new(max_head_offpolicyness=5, num_servers=3, max_concurrent_rollouts=None),
        allocation_mode="lite.d3+d2",
    )
    found = scenario(config, costs, steps=7, seed=1)
    assert (found.bound, found.num_servers, found.concurrency, found.group, found.steps) == (5, 3, None, 8, 7)
    assert (found.server.grain, found.max_new_tokens) == (4, 256)
    assert found.train_token_s == pytest.approx(costs.train_token_s * 4 / 2)


def test_runs_that_can_not_be_learned_from_say_why(
    simulated: tuple[RunFolder, GRPOConfig, float], tmp_path: Path
) -> None:
    run, config, _ = simulated
    with pytest.raises(ConfigError, match=r"gconfig.n_samples = 8 completions: got \[4\]"):
        learned(run, config.new(gconfig=config.gconfig.new(n_samples=8)), 1)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time/step_s": 1.0}\n')
    with pytest.raises(ConfigError, match="must have 3 steps with rollouts: got 0"):
        measured(RunFolder(tmp_path))


def test_what_a_fit_explains_adds_up_to_what_was_observed() -> None:
    """Weights by the observed seconds explained a fifth less: what took long by chance counted less."""
    draw = np.random.default_rng(1)
    counts, true = draw.uniform(1, 100, size=(2000, 3)), np.array([4e-3, 1e-4, 2e-3])
    seconds = draw.gamma(5.0, counts @ true / 5.0)
    found = _fitted(counts, seconds)
    assert (counts @ found).sum() == pytest.approx(seconds.sum(), rel=1e-3)
    assert found[::2] == pytest.approx(true[::2], rel=0.1)


def test_constants_are_never_negative() -> None:
    counts = np.array([[1.0, 1.0, 40.0], [1.0, 4.0, 160.0], [1.0, 16.0, 640.0], [1.0, 16.0, 4608.0]])
    true = np.array([3e-3, 2e-4, 1e-7])
    assert least_squares(counts, counts @ true) == pytest.approx(true, rel=1e-6)
    falling = least_squares(counts[:, :2], np.array([3.0, 2.0, 1.0, 1.0]))
    assert falling == pytest.approx([7 / 4, 0.0])
