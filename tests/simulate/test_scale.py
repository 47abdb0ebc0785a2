"""Large simulated clusters on which servers die, hang and slow down."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testing_scenarios import H100, h100s
from testing_simulated import lognormal_lengths

from arealite.simulate.run import Simulation, simulate

pytestmark = pytest.mark.slow


def test_servers_that_return_one_by_one_share_what_waits() -> None:
    """Of a step that takes 195 s. It took 3,000 s when the first one that returned got everything."""

    def on_step(step: int) -> None:
        if step == 3:
            simulation.loop.call_later(5.0, lose_all)

    def lose_all() -> None:
        for number, server in enumerate(simulation.servers.values()):
            server.die()
            simulation.loop.call_later(20.0 + 5.0 * number, bring_back, server.address)

    def bring_back(address: str) -> None:
        simulation.servers[address].restart()
        simulation.loop.create_task(simulation.register(address))

    simulation = Simulation(h100s(24, steps=5, warm_up=0), on_step)
    result = simulation.run()
    assert result.failure is None and 195 < result.step_s[-1] < 400


def test_slow_servers_hold_up_no_batch() -> None:
    """A tenth of them, at a quarter of the speed: steps took 358 s, as a slow server kept its requests."""
    results = [simulate(h100s(48, steps=8, warm_up=2, slow_share=0.1, seed=seed)) for seed in (1, 2, 3)]
    assert [result.failure for result in results] == [None] * 3
    assert sum(result.seconds for result in results) / (3 * 8) <= 200


def test_a_filter_that_rejects_most_groups_starves_no_server() -> None:
    """Of three quarters, by default: steps took 52.7 s, as too few prompts waited while the trainer trained."""
    scenario = h100s(15, steps=6, warm_up=7, batch_size=16, concurrency=None, max_new_tokens=32, train_token_s=0.0112,
                     lengths=lognormal_lengths(8, 0.6, 32), rejected_share=0.75,
                     rollout={"max_rejected_in_a_row": 10**6})  # fmt: skip
    result = simulate(scenario)
    assert result.failure is None and result.seconds / scenario.steps < 45


@pytest.mark.parametrize(("slots", "least", "most"), [(256, 65, 96), (8, 32, 64)])
def test_by_default_as_many_episodes_run_as_the_bound_admits_and_servers_have_slots_for(
    slots: int, least: int, most: int
) -> None:
    """Of batches of 32. With 8 slots nothing more starts than what was asked for before the servers were full."""
    num_running = []
    scenario = h100s(12, steps=4, warm_up=0, concurrency=None, server=replace(H100, slots=slots))
    simulation = Simulation(scenario, lambda step: num_running.append(simulation.rollout.stats.running))
    assert simulation.run().failure is None
    assert least <= max(num_running) <= most


def test_servers_that_vanish_hold_up_no_update() -> None:
    """One of 48 in every 150 s: updates took 70 s a step, as each such server held up one for its whole timeout."""
    scenario = h100s(48, steps=8, warm_up=2, mean_life_s=48 * 150.0, hang_share=1.0, restart_s=150.0)
    result = simulate(scenario)
    assert result.failure is None and len(result.deaths) > 5
    assert result.spent_s["weights"] / scenario.steps < 5
