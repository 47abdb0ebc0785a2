"""Who is blocked, on what, since when: one culprit out of the evidence of a stalled run.

In a stall almost everyone waits for someone. The first of the rules below (surest first) that recognises something
names the culprit; the last one always does. Rules about episodes hold only while a trainer waits for episodes. Pure.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import psutil

from arealite.api.source_lines import users_line
from arealite.watchdog.evidence import Evidence, Process, stacks_of

_SILENT_S = 5.0  # a process that publishes twice a second and has not for so long, or half the stall, is not able to
_BUSY_SHARE = 0.5


@dataclass(frozen=True)
class Verdict:
    """One culprit and those who wait for it."""

    culprit: str
    reason: str
    since: float | None
    advice: str
    waiting: tuple[str, ...] = ()

    def lines(self, evidence: Evidence) -> list[str]:
        since = "" if self.since is None else f", for {evidence.now - self.since:.0f} s"
        head = f"stalled: nothing has moved for {evidence.stalled_s:.0f} s, because of {self.culprit}, which"
        return [f"{head} {self.reason}{since}.", *(f"    {text}" for text in (self.advice, *self.waiting))]


def judge(evidence: Evidence) -> Verdict:
    found = next(filter(None, (rule(evidence) for rule in RULES)))
    others = [one for one in evidence.publishing() if not found.culprit.startswith(str(one))]
    return replace(found, waiting=tuple(_waits(one, evidence.now) for one in others))


def _stopped(evidence: Evidence) -> Verdict | None:
    """A process that got SIGSTOP, or is held by a debugger."""
    for one in evidence.processes:
        since = one.progress.published if one.progress else None
        if one.state == psutil.STATUS_TRACING_STOP:
            return Verdict(str(one), "is held by a debugger (state t)", since, "Let the debugger continue it.")
        if one.state == psutil.STATUS_STOPPED:
            advice = f"Continue it with kill -CONT {one.pid}."
            return Verdict(str(one), "is stopped by a signal (state T)", since, advice)
    return None


def _not_begun(evidence: Evidence) -> Verdict | None:
    """A process that has not come to its first progress."""
    publishing = {one.name for one in evidence.publishing()}
    missing = next((name for name in evidence.expected if name not in publishing), None)
    if missing is None:
        return None
    process = next((one for one in evidence.processes if one.name == missing), None)
    reason = "has not come to its first progress" + ("" if process is None else f": {_doing(process)}")
    advice = "Look at its log; a start that takes long needs a larger setup_timeout."
    return Verdict(str(process or missing), reason, None, advice)


def _outside_the_collective(evidence: Evidence) -> Verdict | None:
    """The one rank for which all other ranks wait, unless it waits for something else itself."""
    ranks = evidence.publishing("trainer-")
    outside = [one for one in ranks if not _is_in_collective(one)]
    if len(outside) != 1 or len(ranks) < 2 or _waits_on(outside[0]):
        return None
    (one,) = outside
    what = next((other.wait.what for other in ranks if other is not one and other.wait), "a collective")
    reason = f"has not entered {what}, where all other ranks wait: {_doing(one)}"
    return Verdict(str(one), reason, one.moved, "Every rank must call the same collectives in the same order.")


def _python_lock(evidence: Evidence) -> Verdict | None:
    """A process whose threads can't run, because C code keeps Python's lock."""
    for one in evidence.publishing():
        assert one.progress is not None
        silent_s = evidence.now - one.progress.published
        if silent_s > max(_SILENT_S, evidence.stalled_s / 2) and one.state != psutil.STATUS_DISK_SLEEP:
            lines = [users_line(stack) for stack in stacks_of(one.stacks).values()]  # one of these threads holds it
            where = "; ".join(dict.fromkeys(str(line) for line in lines if line)) or "no line of the user's"
            reason = f"keeps Python's lock in C code: {where}"
            return Verdict(str(one), reason, one.progress.published, "Call it in another process.")
    return None


def _blocked_loop(evidence: Evidence) -> Verdict | None:
    """A line of a workflow that keeps the event loop from turning."""
    for one, name, loop in _reports(evidence, "loop "):
        if blocked := loop["blocked_by"]:
            reason = f"blocks the rollout loop at {blocked['line']} ({name})"
            advice = "Await there, or call it through asyncio.to_thread."
            return Verdict(str(one), reason, blocked["since"], advice)
    return None


def _long_reward(evidence: Evidence) -> Verdict | None:
    """A reward call that has run at least as long as the stall."""
    calls = [(wait, one) for one in _waiting_for_episodes(evidence) for wait in one.waits if wait.on == "reward"]
    if not calls:
        return None
    call, owner = min(calls, key=lambda item: item[0].since)
    where = next((f" at {one.line}" for one in evidence.processes if one.pid == call.pid and one.line), "")
    reason = f"has not returned{where} (called by {owner})"
    advice = "Fix the function; rollout.reward_timeout ends such a call."
    return Verdict(f"{call.what} (pid {call.pid})", reason, call.since, advice)


def _awaiting_episode(evidence: Evidence) -> Verdict | None:
    """Episodes that await something of the user's own."""
    episodes = [(one, owner) for owner, _, made in _reports(evidence, "episodes") for one in made]
    own = [item for item in episodes if item[0]["on"] == "code"]
    if not own:
        return None
    oldest, owner = min(own, key=lambda item: item[0]["since"])
    others = sum(one["line"] == oldest["line"] for one, _ in own) - 1
    reason = f"awaits at {oldest['line']}" + (f", as {others} of the oldest others do" if others else "")
    advice = "Give that await a deadline (asyncio.timeout); rollout.episode_timeout ends the episode otherwise."
    return Verdict(f"episode {oldest['name']} in {owner}", reason, oldest["since"], advice)


def _silent_server(evidence: Evidence) -> Verdict | None:
    """A server that does not answer, or does not work on what it has."""
    processes = {one.name: one for one in evidence.processes}
    for server in evidence.servers:
        process = processes.get(server.name)
        since = process.moved if process else None
        who = f"{process or server.name} at {server.address}"
        if server.answer is None:
            where = f" It is {_doing(process)}." if process and process.stacks else ""
            return Verdict(who, f"does not answer GET /server_info ({server.error})", since, f"Look at its log.{where}")
        if server.answer.get("is_paused") and server.answer.get("waiting"):
            reason = f"is paused with {server.answer['waiting']} requests waiting"
            return Verdict(who, reason, since, "Whoever paused it must POST /continue_generation.")
        if server.answer.get("running"):
            reason = f"generates nothing for {server.answer['running']} running requests"
            return Verdict(who, reason, since, "Look at its log and at its stacks.")
    return None


def _disk(evidence: Evidence) -> Verdict | None:
    """A process in an uninterruptible wait, or that says it waits for a disk."""
    for one in evidence.processes:
        if one.state == psutil.STATUS_DISK_SLEEP or _waits_on(one) == "disk":
            what, since = (one.wait.what, one.wait.since) if one.wait else ("a disk or device", None)
            reason = f"waits for {what} (state {one.state}; {evidence.disk}): {_doing(one)}"
            return Verdict(str(one), reason, since, "Look at the disk and at its network mounts.")
    return None


def _busy_or_first(evidence: Evidence) -> Verdict:
    """Whoever waits for nobody, else whoever has waited longest."""
    published = [one for one in evidence.publishing() if not _is_idle_server(one, evidence)]
    if not published:
        return Verdict("the run", "has published no progress at all", None, "Look at the logs and the stacks.")

    def since(one: Process) -> float:
        return one.wait.since if one.wait else one.moved or 0.0

    one = min(published, key=lambda one: (_waits_on(one) is not None, since(one)))
    return Verdict(str(one), _doing(one), since(one), "Look at its stack.")


RULES: tuple[Callable[[Evidence], Verdict | None], ...] = (
    _stopped,
    _not_begun,
    _outside_the_collective,
    _python_lock,
    _blocked_loop,
    _long_reward,
    _awaiting_episode,
    _silent_server,
    _disk,
    _busy_or_first,
)


def _waits_on(one: Process) -> str | None:
    return one.wait.on if one.wait else None


def _is_in_collective(one: Process) -> bool:
    """Whether a rank says so, or its main thread is inside torch.distributed (a call of the user's own)."""
    return _waits_on(one) == "ranks" or any("/torch/distributed/" in line.file for line in one.main_stack()[:8])


def _is_idle_server(one: Process, evidence: Evidence) -> bool:
    answers = [server.answer for server in evidence.servers if server.name == one.name]
    return any(not (answer is None or answer.get("running") or answer.get("waiting")) for answer in answers)


def _reports(evidence: Evidence, prefix: str) -> Iterator[tuple[Process, str, Any]]:
    """Yield what trainers that wait for episodes report under names that begin so."""
    for one in _waiting_for_episodes(evidence):
        for name, made in one.progress.reports.items() if one.progress else ():
            if name.startswith(prefix) and "error" not in made:
                yield one, name, made


def _waiting_for_episodes(evidence: Evidence) -> list[Process]:
    return [one for one in evidence.publishing() if _waits_on(one) == "rollout"]


def _doing(one: Process) -> str:
    busy = f" with {100 * one.cpu_share:.0f} % of a core" if one.cpu_share > _BUSY_SHARE else ""
    waits = f"waits for {one.wait.what}" if one.wait else "runs"
    return f"{waits}{busy}" + ("" if one.line is None else f" at {one.line}")


def _waits(one: Process, now: float) -> str:
    return f"{one} waits for {one.wait.what}, for {now - one.wait.since:.0f} s" if one.wait else f"{one}: {_doing(one)}"
