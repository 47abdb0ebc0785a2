"""Predicted steps: worked by hand, and equal to what a run of known costs would have measured."""

import math
import tempfile
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing_plans import SECONDS, on_one_rank, ppo_config, record, write_run

from arealite.api.cli_args import PPOConfig
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.cli.plan_groups import Layout, layouts, measure, simulate
from arealite.core.experiments import ppo
from arealite.core.records import CallLog, read_calls
from arealite.launcher.plan.layout import make_layout

CONFIG = ppo_config()
GRAPH = ppo(CONFIG)
ranks = st.integers(1, 4)
prices = st.fixed_dictionaries({name: st.floats(0.01, 100.0) for name in SECONDS})


@cache
def layout(*workers: str) -> Layout:
    return make_layout(ppo_config(*(f"workers.{one}" for one in workers)), GRAPH.engines)


def graph_s(on: Layout, seconds: dict[str, float]) -> float:
    return max(end for _, end in simulate(GRAPH, on, on_one_rank(CONFIG, GRAPH, seconds)).values())


def test_a_step_of_ppo_by_hand() -> None:
    assert graph_s(layout("actor.ranks=1"), SECONDS) == 2 + 3 + 1 + 4 + 5
    assert simulate(GRAPH, layout("actor.ranks=1", "critic.ranks=1"), on_one_rank(CONFIG, GRAPH, SECONDS)) == {
        "actor_inf": (0, 2),
        "critic_inf": (0, 3),
        "advantages": (3, 4),
        "actor_train": (4, 8),
        "critic_train": (4, 9),
    }
    assert graph_s(layout("actor.ranks=2"), SECONDS) == pytest.approx(15 * (0.1 + 0.9 / 2))


def test_a_group_whose_ranks_have_unequal_numbers_of_parts_is_as_slow_as_the_busiest() -> None:
    spans = simulate(GRAPH, layout("actor.ranks=3", "critic.ranks=2"), on_one_rank(CONFIG, GRAPH, SECONDS))
    assert spans["critic_inf"][1] == pytest.approx(3 * (0.1 + 0.9 * 2 / 3)), "three parts on two ranks"
    assert spans["actor_inf"][1] == pytest.approx(2 * (0.1 + 0.9 / 3))


@given(ranks, prices)
def test_one_group_does_one_call_after_the_other(num_ranks: int, seconds: dict[str, float]) -> None:
    all_calls = sum(one * (0.1 + 0.9 / num_ranks) for one in seconds.values())
    assert graph_s(layout(f"actor.ranks={num_ranks}"), seconds) == pytest.approx(all_calls)


@settings(max_examples=6, deadline=None)
@given(ranks, st.one_of(st.none(), ranks), prices)
def test_the_layout_of_a_run_is_predicted_as_measured(
    actor: int, critic: int | None, seconds: dict[str, float]
) -> None:
    config = ppo_config(f"workers.actor.ranks={actor}", f"workers.critic.ranks={critic or 'null'}")
    with tempfile.TemporaryDirectory() as folder:
        run = measure(write_run(Path(folder) / "run", config, GRAPH, seconds), config, GRAPH)
    expected = graph_s(run.layout, seconds)
    assert run.num_steps == 3, "all but the first"
    assert run.graph_s == pytest.approx(expected, abs=1e-5)
    assert max(end for _, end in simulate(GRAPH, run.layout, run).values()) == pytest.approx(expected, abs=1e-5)
    assert run.timers["step"] == pytest.approx(20.0 + expected + 1.0)


def test_steps_of_the_warm_up_of_another_config_and_with_a_repeated_call_are_left_out(tmp_path: Path) -> None:
    config = ppo_config("critic_warmup_steps=2", "workers={}")
    run = write_run(tmp_path / "run", config, GRAPH, SECONDS, factors=(1, 1, 2, 3, 4, 50, 1))
    records = read_calls(run.calls)
    log = CallLog(run.calls)
    for one in records:
        log.append(one)
        if (one.step, one.call) == (5, "critic_inf"):
            log.append(replace(one, attempt=2))
        if (one.step, one.call) == (6, "critic_inf"):
            break  # the step that runs now
    assert measure(run, config, GRAPH).num_steps == 3, "steps 2 to 4"
    (run.path / "config_until_3.yaml").touch()
    measured = measure(run, config, GRAPH)
    assert measured.num_steps == 2, "steps 3 and 4"
    assert measured.graph_s == pytest.approx(3.5 * 15)
    assert measured.timers == {"rollout": 20.0, "weights": 0.5, "step": pytest.approx(20 + 3.5 * 15 + 1)}


@pytest.mark.parametrize("num_devices", [1, 2, 3, 6])
def test_every_layout_on_some_devices_is_tried_once(num_devices: int) -> None:
    config = ppo_config("ref={}", "actor.kl_ctl=0.1")
    found = [on for _, on in layouts(config, ppo(config), num_devices)]
    shapes = [tuple(sorted((sorted(group.roles), group.num_ranks) for group in on)) for on in found]
    ways = {1: 1, 2: 3, 3: 1}  # to put three roles into so many groups
    expected = sum(number * math.comb(num_devices, groups) for groups, number in ways.items())
    assert len(shapes) == expected and max(Counter(map(str, shapes)).values()) == 1
    assert all(sum(group.num_ranks for group in on) <= num_devices for on in found)


def test_layouts_keep_strategies_and_fit_the_cluster() -> None:
    cluster = ("cluster.n_nodes=2", "cluster.n_gpus_per_node=4", "allocation_mode=sglang.d2p1t1+d1p1t1")
    config = ppo_config(*cluster, "workers.actor.strategy=STRICT_PACK", "workers.restarts=7")
    found = [*layouts(config, GRAPH, 8)]
    assert {(workers.actor.strategy, workers.restarts) for workers, _ in found} == {("STRICT_PACK", 7)}
    assert max(on[0].num_ranks for _, on in found) == 4, "on one node"
    assert max(sum(group.num_ranks for group in on) for _, on in found) == 6, "beside two servers"


def test_runs_without_what_a_prediction_needs_are_refused(tmp_path: Path) -> None:
    config = ppo_config("workers={}")
    run = write_run(tmp_path / "run", config, GRAPH, SECONDS, factors=(1,))
    complaint = refusal(run, config)
    assert (
        complaint.startswith("--measured must hold a complete step") and f": got 1 steps in {run.path}. " in complaint
    )
    CallLog(run.calls).append(record("actor_inf", 0, "actor", "actor", 0.0, 1.0))
    complaint = refusal(run, config)
    assert complaint.startswith("--measured must hold the calls") and f": got actor_inf in {run.path}. " in complaint


def refusal(run: RunFolder, config: PPOConfig) -> str:
    with pytest.raises(ConfigError) as error:
        measure(run, config, GRAPH)
    return str(error.value)
