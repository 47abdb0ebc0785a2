"""Online mode: trains on sessions that people or other programs open over HTTP, in place of a data set.

    sessions = OnlineSessions(gconfig, tokenizer, RunFolder(config.rollout).path, config=config.agent)
    batch = rollout.prepare_batch(sessions, sessions)

Every session is part of an episode: staleness, capacity, ledger and audit work as in any other run. Sessions that were
open when a run was killed are issued again after the restart and rejected as `gone`, as their clients have left.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from arealite.agent.door import Door, Group
from arealite.agent.session import Session
from arealite.agent.workflow import model_of, rows_of
from arealite.api.cli_args import AgentConfig, GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import AbandonedError, AgentError, ConfigError, TrajectoryError
from arealite.api.io_struct import PromptId
from arealite.api.workflow_api import OutsideRows, RolloutWorkflow
from arealite.utils.secret import ensure_secret
from arealite.utils.tensors import concat_padded_tensors

logger = logging.getLogger("arealite.agent")


class OnlineSessions(RolloutWorkflow, OutsideRows):
    """Dataloader and workflow in one; listens on global rank 0 from the first `prepare_batch` on.

    A group is up to `gconfig.n_samples` sessions of one `task_id`, or one session without a task. It is complete when
    all have ended, or after `online.deadline_s`; sessions that ended with a reward are trained on.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        run_folder: Path,
        turn_discount: float = 1.0,
        *,
        config: AgentConfig | None = None,
        enable_thinking: bool = False,
    ) -> None:
        """`run_folder` holds the run's secret, which opens sessions."""
        self.gconfig, self.tokenizer, self.config = gconfig, tokenizer, config or AgentConfig()
        self.turn_discount = turn_discount
        self._run_folder = run_folder
        self._model = model_of(gconfig, tokenizer, self.config, enable_thinking=enable_thinking)
        self._door: Door | None = None

    @property
    def address(self) -> str:
        """The address at which sessions are opened."""
        assert self._door is not None, "prepare_batch opens the door"
        return self._door.address

    def open(self, admit: Callable[[dict[str, Any]], Future[bool]], *, episode_timeout: float) -> None:
        online = self.config.online
        if online.deadline_s >= episode_timeout:
            raise ConfigError(
                f"agent.online.deadline_s must be less than rollout.episode_timeout = {episode_timeout:g}: got "
                f"{online.deadline_s:g}. Lower it, or raise the other."
            )
        self._run_folder.mkdir(parents=True, exist_ok=True)
        secret = ensure_secret(self._run_folder)
        num_samples, heartbeat_s = self.gconfig.n_samples, self.config.heartbeat_s
        self._door = Door(online, secret, admit, num_samples=num_samples, heartbeat_s=heartbeat_s)
        logger.warning("sessions are opened by POST %s/sessions", self._door.address)

    def fetch(self, prompt_id: PromptId) -> dict[str, Any]:
        return {"prompt_id": prompt_id}

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the ledger records the sessions."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: see `state_dict`."""

    def metrics(self) -> dict[str, float]:
        """Return the numbers of sessions opened, refused, ended and dropped since the start, and open now (rank 0)."""
        if self._door is None:
            return {}
        counts = {name: self._door.counts[name] for name in ("opened", "refused", "ended", "dropped", "unusable")}
        counts["open"] = counts["opened"] - counts["ended"] - counts["dropped"]
        return {f"agent/sessions_{name}": float(count) for name, count in counts.items()}

    def close(self) -> None:
        """End all sessions and refuse new ones."""
        if self._door is not None:
            self._door.close()
        self._model.tokenizing.shutdown()

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict:
        """Serve the sessions of one group until they end."""
        group: Group | None = data.get("group")
        if self._door is None or group is None or group.is_over:
            raise AbandonedError("gone")
        sessions = [Session(engine, self._model, seed_key=str(place)) for place in range(group.size)]
        failures = [session.failure for session in sessions]
        served = asyncio.wrap_future(self._door.loop.submit(self._door.run(group, sessions)))
        try:
            ends: list[asyncio.Future[Any]] = [served, *failures]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if errors := [error for one in failures if one.done() and (error := one.exception())]:
                raise errors[0]
            rewarded = served.result()
        finally:
            served.cancel()
        rows = [row for place, one in enumerate(rewarded) if (row := await self._rows(*one, place)) is not None]
        if not rows:
            raise AbandonedError("abandoned")
        return concat_padded_tensors(rows)

    async def _rows(self, session: Session, reward: Any, place: int) -> TensorDict | None:
        """Return the rows of a session, or None if it can't be trained on."""
        try:
            return await session.tokenized(rows_of, session, reward, place, self.turn_discount)
        except (AgentError, TrajectoryError) as error:
            assert self._door is not None
            self._door.counts["unusable"] += 1
            logger.warning("a session is not trained on: %s", error)
            return None
