"""The endpoints that open sessions: `POST /sessions`, `/sessions/{id}/reward`, `/sessions/{id}/end`.

Sessions of one task form a group, and a group is an episode. Invariants: an open session belongs to a running episode,
so no client waits; a session that can't start now is refused at once (429), never later; a session ends once, and is
dropped when it is idle, when its group's deadline has passed, or with its episode. All state belongs to the proxy's
loop.
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
from typing import Any, Literal

from aiohttp import web

from arealite.agent.server import Proxy, parsed
from arealite.agent.session import Session
from arealite.agent.wire.base import RefusedError, Wire
from arealite.agent.workflow import as_rewards
from arealite.api.cli_args import OnlineConfig
from arealite.api.errors import AgentError
from arealite.utils.secret import is_authorized, refusal

logger = logging.getLogger("arealite.agent")

_RETRY_AFTER_S = 5
_BEGIN_S = 30.0  # from the admission of an episode to its start; longer means a blocked event loop
_NUM_KNOWN = 100_000  # ended sessions that are remembered
_NOT_YET = object()
_MAX_TASK_CHARACTERS = 256

Admit = Callable[[dict[str, Any]], Future[bool]]


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
            rewarded = [one for one in group.visits if one.state == "ended" and one.reward not in (None, _NOT_YET)]
            return [(one.session, one.reward) for one in rewarded if one.session is not None]
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
