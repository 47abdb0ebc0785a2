"""A trainer that is killed at any moment of virtual time, and trains on from its checkpoint with the real ledger."""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import testing_forks
from testing_scenarios import random_scenario

from arealite.api.run_folder import RunFolder
from arealite.dataset.loader import PromptLoader
from arealite.rollout.account.audit import audit
from arealite.rollout.account.ledger import open_for_reading
from arealite.simulate.run import Simulation

NUM_ROWS, NUM_STEPS, SAVED_EVERY = 30, 14, 2
OVERTAKERS = """SELECT count(*) FROM prompts WHERE state = 'trained'
AND ticket > (SELECT min(ticket) FROM prompts WHERE state IN ('issued', 'running', 'accepted'))"""


class Recovering(Simulation):
    """Saves every second step what a checkpoint has of the rollouts, and goes on from there."""

    def __init__(self, seed: int, folder: Path, killed_in: int | None) -> None:
        scenario = random_scenario(seed)
        rollout = scenario.rollout | {"fileroot": str(folder)}
        super().__init__(replace(scenario, warm_up=0, steps=NUM_STEPS, rollout=rollout), self.save)
        rows = [{"input_ids": [number, 1, 2, 3]} for number in range(NUM_ROWS)]
        self.prompts = self.loader = PromptLoader(rows, scenario.batch_size, seed=seed)
        self.checkpoint, self.killed_in = folder / "checkpoint", killed_in

    def _train(self) -> None:
        if self.checkpoint.exists():
            state = json.loads(self.checkpoint.read_bytes())
            self.first_step = state["step"] + 1
            self.rollout.load_state_dict(state["rollout"])
            self.loader.load_state_dict(state["loader"])
        super()._train()

    def save(self, step: int) -> None:
        if step == self.killed_in:  # which took less long than the step before it
            os.kill(os.getpid(), signal.SIGKILL)
        if step % SAVED_EVERY == 0:
            state = {"step": step, "loader": self.loader.state_dict(), "rollout": self.rollout.state_dict()}
            self.checkpoint.write_text(json.dumps(state))
            self.rollout.note_checkpoint(step, state["rollout"]["ledger_position"])
        if step + 1 == self.killed_in:
            left_s = random.Random(step).uniform(0, self.result.step_s[-1])
            self.loop.call_later(left_s, os.kill, os.getpid(), signal.SIGKILL)


def train(folder: Path, seed: int, killed_in: int | None) -> int:
    """Train to the end, or until the process is killed; return how many tokens were staler than the bound."""
    simulation = Recovering(seed, folder, killed_in)
    result = simulation.run()
    if result.failure is not None:
        raise result.failure
    return sum(num for staleness, num in result.staleness.items() if staleness > simulation.scenario.bound)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_a_trainer_that_is_killed_loses_and_repeats_no_prompt(tmp_path: Path, seed: int) -> None:
    for killed_in in (2, 5, None):
        process = testing_forks.start(train, tmp_path, seed, killed_in)
        ended = 0 if killed_in is None else -signal.SIGKILL
        assert testing_forks.status_of(process, testing_forks.DEADLINE_S) == ended
    run, scenario = RunFolder(tmp_path / "simulated" / "simulated"), random_scenario(seed)
    found = audit(run.path)
    assert (found.trained, found.lost, found.repeated) == (NUM_STEPS * scenario.batch_size, 0, 0), found
    with open_for_reading(run.ledger) as database:
        (num_overtakers,) = database.execute(OVERTAKERS).fetchone()
    assert num_overtakers <= (scenario.bound + 1) * scenario.batch_size, "an open prompt was forgotten"
