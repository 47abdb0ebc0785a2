"""The stored batches of an earlier run in place of new episodes, for `arealite replay`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from tensordict import TensorDict

from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.api.workflow_api import RolloutWorkflow
from arealite.rollout.account.stored_batch import read_batches
from arealite.rollout.prompts import Row, ShouldAccept


class Replay:
    """Takes the executor's place on rank 0: returns the run's batches of the engine's version in their order."""

    def __init__(self, folder: str, engine: InferenceEngine) -> None:
        self._folder = RunFolder(folder).rollouts
        self._engine = engine
        self._left: dict[str, deque[TensorDict]] = {}

    def submit(self, row: Row, workflow: RolloutWorkflow) -> None:
        """Start nothing: what became of the episode is stored."""

    def wait(self, count: int, timeout: float | None = None, should_accept: ShouldAccept | None = None) -> TensorDict:
        """Return the next batch."""
        return self._next(f"step_{self._engine.get_version()}.jsonl")

    def prepare_batch(
        self, dataloader: Iterable[list[Row]], workflow: RolloutWorkflow, should_accept: ShouldAccept | None = None
    ) -> TensorDict:
        """Return the next batch."""
        return self._next(f"step_{self._engine.get_version()}.jsonl")

    def run_all(self, rows: Sequence[Row], workflow: RolloutWorkflow, *, is_evaluation: bool = False) -> TensorDict:
        """Return the next batch, or the next one that was evaluated."""
        return self._next(f"{'eval_' * is_evaluation}step_{self._engine.get_version()}.jsonl")

    def _next(self, name: str) -> TensorDict:
        path = self._folder / name
        if name not in self._left:
            self._left[name] = deque(read_batches(path) if path.exists() else [])
        if not self._left[name]:
            raise ConfigError(
                f"{path} must hold each batch that the script asks for: got no more. "
                "Replay with the script and config of the run."
            )
        return self._left[name].popleft()
