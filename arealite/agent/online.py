"""Online mode: trains on sessions that people or other programs open over HTTP, in place of a data set.

    sessions = OnlineSessions(gconfig, tokenizer, RunFolder(config.rollout).path, config=config.agent)
    batch = rollout.prepare_batch(sessions, sessions)

Every session is part of an episode: staleness, capacity, ledger and audit work as in any other run. Sessions that were
open when a run was killed are issued again after the restart and rejected as `gone`, as their clients have left.

`Door` serves `POST /sessions`, `/sessions/{id}/reward` and `/sessions/{id}/end`. Sessions of one task form a group, and
a group is an episode. Invariants: an open session belongs to a running episode, so no client waits; a session that
can't start now is refused at once (429), never later; a session ends once, and is dropped when it is idle, when its
group's deadline has passed, or with its episode. The door's state belongs to the proxy's loop.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aiohttp import web
from tensordict import TensorDict

from arealite.agent.server import Proxy, parsed
from arealite.agent.session import Session
from arealite.agent.wire.base import RefusedError, Wire
from arealite.agent.workflow import as_rewards, model_of, rows_of
from arealite.api.cli_args import AgentConfig, GenerationHyperparameters, OnlineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import AbandonedError, AgentError, ConfigError, TrajectoryError
from arealite.api.io_struct import PromptId
from arealite.api.workflow_api import OutsideRows, RolloutWorkflow
from arealite.utils.secret import ensure_secret, is_authorized, refusal
from arealite.utils.tensors import concat_padded_tensors

logger = logging.getLogger("arealite.agent")

_RETRY_AFTER_S = 5
_BEGIN_S = 30.0  # from the admission of an episode to its start; longer means a blocked event loop
_NUM_KNOWN = 100_000  # ended sessions that are remembered
_NOT_YET = object()
_MAX_TASK_CHARACTERS = 256

Admit = Callable[[dict[str, Any]], Future[bool]]


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
            if errors := [error for failure in failures if failure.done() and (error := failure.exception())]:
                raise errors[0]
            rewarded = served.result()
        finally:
            served.cancel()
        rows = [row for place, visit in enumerate(rewarded) if (row := await self._rows(*visit, place)) is not None]
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


@dataclass(eq=False)
class Visit:
    """A taken place in a group."""

    key: str
    group: "Group"
    session: Session | None  # None once its group has ended
    began_s: float
    reward: Any = _NOT_YET
    num_turns: int = 0
    state: Literal["open", "ended", "dropped"] = "open"
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))


@dataclass(eq=False)
class Group:
    """The sessions of one task."""

    task_id: str | None
    size: int
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # there are places
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    places: list[Session] = field(default_factory=list)  # not taken yet
    visits: list[Visit] = field(default_factory=list)
    is_over: bool = False

    @property
    def open(self) -> list[Visit]:
        return [visit for visit in self.visits if visit.state == "open"]


class Door(Proxy):
    """The proxy of sessions that external clients open."""

    def __init__(
        self, config: OnlineConfig, secret: str, admit: Admit, *, num_samples: int, heartbeat_s: float
    ) -> None:
        self.config, self.counts = config, Counter[str]()
        self._secret, self._admit, self._num_samples = secret, admit, num_samples
        self._visits: OrderedDict[str, Visit] = OrderedDict()
        self._groups: dict[str, Group] = {}  # by task
        self._one_by_one = asyncio.Lock()
        more = {
            "/sessions": self._open_session,
            "/sessions/{id}/reward": self._reward_session,
            "/sessions/{id}/end": self._end_session,
        }
        super().__init__(heartbeat_s=heartbeat_s, host=config.host, port=config.port, more=more)

    # Called by the episode of a group

    async def run(self, group: Group, sessions: list[Session]) -> list[tuple[Session, Any]]:
        """Serve a group until it is complete or its deadline has passed; return rewarded sessions in opening order."""
        loop = asyncio.get_running_loop()
        deadline_s = time.monotonic() + self.config.deadline_s
        group.places = sessions[::-1]
        group.begun.set()
        try:
            while (group.open or group.places) and (now := time.monotonic()) < deadline_s:
                group.changed.clear()
                idle = {visit: self._idle_from(visit, now) for visit in group.open}
                for visit in [visit for visit, idle_s in idle.items() if idle_s <= now]:
                    await self._close(visit, "dropped")
                    del idle[visit]
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(loop.time() + min([deadline_s, *idle.values()]) - now):
                        await group.changed.wait()
            ended = [visit for visit in group.visits if visit.state == "ended" and visit.reward not in (None, _NOT_YET)]
            return [(visit.session, visit.reward) for visit in ended if visit.session is not None]
        finally:
            group.is_over = True
            if group.task_id is not None and self._groups.get(group.task_id) is group:
                del self._groups[group.task_id]
            for visit in group.open:
                await self._close(visit, "dropped")
            for visit in group.visits:
                visit.session = None

    def _idle_from(self, visit: Visit, now: float) -> float:
        """Return the time at which a session without activity counts as idle."""
        assert visit.session is not None
        last_s = now if visit.session.num_busy else max(visit.began_s, visit.session.last_seen_s)
        return last_s + self.config.idle_s

    async def _close(self, visit: Visit, state: Literal["ended", "dropped"]) -> None:
        assert visit.session is not None and visit.state == "open"
        visit.state = state
        self.counts[state] += 1
        await self._end(visit.session)
        visit.num_turns = len(visit.session.run.turns)
        visit.group.changed.set()

    # Requests

    async def _open_session(self, request: web.Request, _: Wire) -> web.StreamResponse:
        if not is_authorized(request.headers.get("Authorization"), self._secret):
            raise RefusedError(refusal(request.method, request.path), "no_key", 401)
        task_id = parsed(await request.read() or b"{}").get("task_id")
        if task_id is not None and not (isinstance(task_id, str) and 0 < len(task_id) <= _MAX_TASK_CHARACTERS):
            limits = f"1 to {_MAX_TASK_CHARACTERS} characters"
            raise RefusedError(f"task_id must be a string of {limits}: got {task_id!r:.60}. Leave it out for none.")
        # A client that disconnects must not leave an episode without a session.
        visit = await asyncio.shield(asyncio.ensure_future(self._visit(task_id)))
        if visit is None or visit.session is None:
            self.counts["refused"] += 1
            message = "sessions must wait for a new version of the weights, or for others to end: got one too many."
            error = {"error": {"message": f"{message} Ask again."}}
            return web.json_response(error, status=429, headers={"Retry-After": str(_RETRY_AFTER_S)})
        keys = {"api_key": visit.key, "untrained_key": visit.session.untrained_key}
        base_url = f"{request.scheme}://{request.host}/v1"
        return web.json_response({"id": visit.id, **keys, "base_url": base_url}, status=201)

    async def _visit(self, task_id: str | None) -> Visit | None:
        """Take a place in the group of a task or in a new group; None if no episode may start now."""
        async with self._one_by_one:
            group = self._groups.get(task_id) if task_id is not None else None
            if group is None or not group.places:
                group = await self._new_group(task_id)
            if group is None or group.is_over:
                return None
            session = group.places.pop()
            await self._open(session)
            visit = Visit(session.key, group, session, time.monotonic())
            group.visits.append(visit)
            self._visits[visit.id] = visit
            while len(self._visits) > _NUM_KNOWN:
                self._visits.popitem(last=False)
            self.counts["opened"] += 1
            group.changed.set()
            return visit

    async def _new_group(self, task_id: str | None) -> Group | None:
        group = Group(task_id, self._num_samples if task_id is not None else 1)
        try:
            if not await asyncio.wrap_future(self._admit({"group": group})):
                return None
            async with asyncio.timeout(_BEGIN_S):
                await group.begun.wait()
        except Exception as error:  # an error that ends the run, or an episode dropped before its start
            logger.info("a session can't be opened: %s", error)
            group.is_over = True
            return None
        if task_id is not None:
            self._groups[task_id] = group
        return group

    async def _reward_session(self, request: web.Request, _: Wire) -> web.StreamResponse:
        visit = self._found(request)
        raw = await request.read()
        if visit.state != "open" or visit.session is None:
            message = f"rewards must come before the end of a session: this one was {visit.state}."
            raise RefusedError(message, "session_ended", 409)
        body = parsed(raw or b"{}")
        if "reward" not in body:
            raise RefusedError('the body must be {"reward": ...}: got none. Send a number, or null.')
        reward = body["reward"]
        try:
            if reward is not None:
                as_rewards(reward, visit.session.run)
        except AgentError as error:
            raise RefusedError(str(error)) from error
        if visit.reward not in (_NOT_YET, reward):
            message = f"a session must have one reward: got {reward!r:.60} after {visit.reward!r:.60}."
            raise RefusedError(message, "session_rewarded", 409)
        visit.reward = reward
        return web.json_response({})

    async def _end_session(self, request: web.Request, _: Wire) -> web.StreamResponse:
        visit = self._found(request)
        if visit.state == "open":
            await self._close(visit, "ended")
        if visit.state == "dropped":
            message = "sessions must end before they are dropped: this one was idle, or its time was up."
            raise RefusedError(message, "session_dropped", 409)
        return web.json_response({"turns": visit.num_turns, "is_rewarded": visit.reward not in (_NOT_YET, None)})

    def _found(self, request: web.Request) -> Visit:
        """Return the session of a request with its key or the run's secret. Raises RefusedError."""
        header = request.headers.get("Authorization")
        visit = self._visits.get(request.match_info["id"])
        if not is_authorized(header, self._secret) and not (visit and is_authorized(header, visit.key)):
            message = "requests must show the key of the session, or the secret of the run: got neither."
            raise RefusedError(message, "no_key", 401)
        if visit is None:
            message = "the session must be one of this run since it has started: got another id."
            raise RefusedError(message, "no_session", 404)
        if visit.session is not None:
            visit.session.last_seen_s = time.monotonic()
        return visit
