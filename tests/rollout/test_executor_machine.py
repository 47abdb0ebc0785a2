"""The real executor, ledger and rollout store under any sequence of batches, checkpoints and crashes.

A machine trains, takes checkpoints and dies, and keeps books of its own: what survives must hold each prompt once, also
when the newest checkpoints turn out to be damaged.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tensordict import TensorDict
from testing_adversary import RETRIES, CorneredExecutor, HeldWorkflow
from testing_rollouts import stored_rows
from testing_workflows import IdleEngine

from arealite.api.cli_args import InferenceEngineConfig
from arealite.dataset.loader import PromptLoader
from arealite.rollout.account.audit import audit

_ROWS = 13


def accept(trajectory: TensorDict) -> bool:
    return bool(trajectory["rewards"][0] > 0)


class Machine(RuleBasedStateMachine):
    """A trainer that may die at any moment between two calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.folder = tempfile.TemporaryDirectory()
        self.trained: dict[str, int] = {}
        """The step of each surviving prompt."""
        self.checkpoints: list[dict[str, Any]] = []
        """Oldest first."""

    @initialize(
        eta=st.integers(0, 3),
        batch_size=st.integers(1, 4),
        max_concurrent=st.sampled_from([2, 5, 64]),
        overdue=st.sampled_from(["wait", "drop"]),
        seed=st.integers(0, 2**32),
    )
    def begin(
        self, eta: int, batch_size: int, max_concurrent: int, overdue: Literal["wait", "drop"], seed: int
    ) -> None:
        self.rng = random.Random(seed)
        self.config = InferenceEngineConfig(
            consumer_batch_size=batch_size,
            max_head_offpolicyness=eta,
            max_concurrent_rollouts=max_concurrent,
            overdue=overdue,
            max_failed_share=1.0,
            episode_retries=RETRIES,
            episode_timeout=600.0,
            fileroot=self.folder.name,
            experiment_name="exp",
            trial_name="trial",
        )
        self.start()

    def start(self) -> None:
        """Start a process: from the newest checkpoint if there is one."""
        self.engine = IdleEngine(self.config, CorneredExecutor)
        self.executor = self.engine.executor
        assert isinstance(self.executor, CorneredExecutor)
        self.workflow = self.executor.adversary = HeldWorkflow(self.rng, straggler_share=0.9)
        self.loader = PromptLoader([{"row": i} for i in range(_ROWS)], 3, seed=5)
        if self.checkpoints:
            newest = self.checkpoints[-1]
            self.loader.load_state_dict(newest["cursor"])
            self.executor.load_state_dict(newest["rollout"])
            self.engine.set_version(newest["version"])

    def keep(self, batch: TensorDict) -> None:
        version = self.engine.version
        is_sampled = batch["loss_mask"].bool()
        assert version - int(batch["versions"][is_sampled].min()) <= self.config.max_head_offpolicyness
        for prompt_id in (row["prompt_id"] for row in stored_rows(self.run_folder / "rollouts" / f"step_{version}")):
            assert prompt_id not in self.trained, f"{prompt_id} was trained in step {self.trained[prompt_id]} already"
            self.trained[prompt_id] = version

    @property
    def run_folder(self) -> Path:
        return Path(self.folder.name) / "exp" / "trial"

    @rule()
    def train(self) -> None:
        """Do a step."""
        batch = self.executor.prepare_batch(self.loader, self.workflow, accept)
        self.executor.state_dict()
        self.keep(batch)
        self.executor.loop.run(self.workflow.end_some())
        self.engine.set_version(self.engine.version + 1)

    @rule()
    def take_checkpoint(self) -> None:
        state = json.loads(json.dumps(self.executor.state_dict()))
        version = self.engine.version
        self.checkpoints.append({"cursor": self.loader.state_dict(), "rollout": state, "version": version})
        self.executor.note_checkpoint(version - 1, state["ledger_position"])

    @rule(num_damaged=st.sampled_from([0, 0, 1, 2]))
    def die(self, num_damaged: int) -> None:
        """Lose all memory, and the newest checkpoints; an orderly close writes at least as much as a kill -9."""
        self.executor.close()
        del self.checkpoints[max(0, len(self.checkpoints) - num_damaged) :]
        version = self.checkpoints[-1]["version"] if self.checkpoints else 0
        self.trained = {prompt_id: step for prompt_id, step in self.trained.items() if step < version}
        self.start()

    def teardown(self) -> None:
        if hasattr(self, "executor"):
            self.workflow.is_kind = True
            self.train()
            self.executor.close()
            found = audit(self.run_folder)
            assert (found.lost, found.repeated, found.trained) == (0, 0, len(self.trained)), found
        self.folder.cleanup()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=settings.default.max_examples // 3, stateful_step_count=20)
