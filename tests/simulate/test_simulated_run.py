"""Simulated runs: numbers that must not move, theory, invariants, and what they have exposed in the runtime."""

from __future__ import annotations

import pytest
from testing_scenarios import random_scenario
from testing_simulated import lognormal_lengths

from arealite.planner.scenario import Scenario, ServerProfile
from arealite.simulate.run import Simulation, simulate

SPREAD = lognormal_lengths(64, 1.0, 512)
CROWDED = ServerProfile(step_s=0.01, sequence_s=2e-4)


@pytest.mark.parametrize(
    ("bound", "seconds", "num_calls", "staleness"),
    [(0, 154.0273925699993, 5440, 0.0), (1, 97.04864746526607, 6033, 0.8708582872522945)],
)
def test_numbers_stay_the_same(bound: int, seconds: float, num_calls: int, staleness: float) -> None:
    """Bit by bit, also of another process with other hash seeds."""
    result = simulate(Scenario(bound=bound, concurrency=32, train_s=1.0, lengths=SPREAD, server=CROWDED))
    assert result.failure is None
    assert (result.seconds, result.num_calls, result.mean_staleness) == (seconds, num_calls, staleness)
    assert max(result.staleness) == bound


def test_a_run_with_failures_is_the_same_twice() -> None:
    scenario = Scenario(num_servers=8, steps=4, warm_up=1, lengths=SPREAD, mean_life_s=12.0, hang_share=0.5,
                        restart_s=5.0, rollout={"weight_update_timeout": 20.0})  # fmt: skip
    first, second = simulate(scenario), simulate(scenario)
    assert first == second and len(first.deaths) > 0 and first.failure is None


def test_one_full_server_samples_as_fast_as_its_profile_says() -> None:
    """Lengths are constant and nothing else takes time: so many steps for each full batch of slots."""
    server = ServerProfile(0.01, 1e-3, 0.0, 0.0, slots=16, round_trip_s=0.0, swap_s=0.0)
    scenario = Scenario(
        num_servers=1,
        server=server,
        batch_size=4,
        group=4,
        bound=0,
        lengths=lognormal_lengths(100, 0.0, 100),
        max_new_tokens=100,
        train_s=0.0,
        train_token_s=0.0,
        weight_bytes=8.0,
        steps=5,
        warm_up=1,
    )
    result = simulate(scenario)
    assert result.seconds == pytest.approx(5 * 100 * (0.01 + 16 * 1e-3), rel=0.01)


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 112))])
def test_no_token_is_staler_than_the_bound_whatever_fails(seed: int) -> None:
    scenario = random_scenario(seed)
    result = simulate(scenario)
    assert result.failure is None and len(result.step_s) == scenario.steps
    assert max(result.staleness) <= scenario.bound


def test_a_server_that_vanishes_holds_up_one_update_until_it_is_known_to_be_dead() -> None:
    """For 12 s, and not for the 120 s that an update may take."""
    scenario = Scenario(num_servers=6, steps=20, warm_up=0, lengths=SPREAD, server=CROWDED, mean_life_s=60.0,
                        hang_share=1.0, restart_s=20.0)  # fmt: skip
    result = simulate(scenario)
    assert result.failure is None and len(result.deaths) >= 5
    assert result.spent_s["weights"] < scenario.steps + 13 * len(result.deaths)


def test_the_clock_of_an_episode_stops_while_no_server_is_there_also_if_it_waited_for_a_slot() -> None:
    """An episode takes at most 32 s, of which it waits 24 s for a slot, and is lost if it takes 60 s."""
    server = ServerProfile(step_s=0.1, slots=2)
    scenario = Scenario(num_servers=1, server=server, batch_size=4, group=2, concurrency=4,
                        lengths=lognormal_lengths(80, 0.0, 80), max_new_tokens=80, steps=3, warm_up=0, train_s=0.0,
                        rollout={"episode_timeout": 60.0, "episode_retries": 0})  # fmt: skip

    failed = []

    def on_step(step: int) -> None:
        failed.append(simulation.rollout.stats.failed)
        if step == 0:
            simulation.loop.call_later(4.0, only.die)
            simulation.loop.call_later(204.0, come_back)

    def come_back() -> None:
        only.restart()
        simulation.loop.create_task(simulation.register(only.address))

    simulation = Simulation(scenario, on_step)
    (only,) = simulation.servers.values()
    result = simulation.run()
    assert result.failure is None and result.step_s[1] > 200 and failed == [0, 0, 0]
