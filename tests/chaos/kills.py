"""Which processes are killed when, drawn from a seed, and the run that suffers it.

A run that has been hit must go on by itself; a launcher that was hit, or has used up its retries, is started again as
its user would. Every end must be explained by a fault: a restart that nobody caused is a defect that retries hide.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.report import say

from arealite.utils.processes import descendants, is_alive, kill_tree, send_signal
from chaos.experiment import STEPS, Experiment, Launcher
from chaos.moments import MOMENTS, OF_NO_STEP, SPAN_S, Mark, Marks, Moment
from chaos.victims import Role, describe, find, listening_ports

FATAL: tuple[Role, ...] = ("server", "trainer", "launcher", "guard")
"""Roles whose death ends a run, so that it must be started again. A server's does so only before it was ready."""
MAY_BE_FATAL: tuple[Role, ...] = (*FATAL, "foreign_server")
"""Others take over from a foreign server, unless it was just receiving weights. A reward worker is replaced."""
_STRIDE = 7
"""Has no divisor in common with the number of meetings of roles and moments."""
_LOOK_S = 0.004
_PORTS_S = 1.0
_LATE_S = 60.0
"""A victim that does not exist so long after its moment is given up."""


@dataclass(frozen=True)
class Kill:
    """One kill -9: `delay_s` after `moment` of `step`, or of a later step, has come."""

    victim: Role
    moment: Moment
    step: int
    delay_s: float
    pick: float
    """Which of the processes of that role, in 0..1."""

    def is_due(self, mark: Mark) -> bool:
        """Tell whether this mark is its moment, and its delay is over."""
        is_its = mark.moment == self.moment and (mark.step >= self.step or self.moment in OF_NO_STEP)
        return is_its and time.monotonic() >= mark.seen_at + self.delay_s


@dataclass
class Outcome:
    """What happened to a run."""

    faults: list[str] = field(default_factory=list)
    """Kinds of what was injected."""
    num_fatal: int = 0
    """Faults each of which may have ended the run once."""
    causes: list[str] = field(default_factory=list)
    """Why it had to be started again, each time."""
    ports: set[int] = field(default_factory=set)
    """On which it has listened."""
    is_done: bool = False
    """Whether the last launcher has ended with status 0."""


def draw(seed: int, *, number: int, steps: int = STEPS, roles: Sequence[Role] = FATAL) -> list[Kill]:
    """Return `number` fatal kills, in the order of their steps.

    They are numbered through all seeds, so that every role meets every moment.
    """
    rng = random.Random(seed)
    meetings = list(itertools.product(roles, MOMENTS))
    kills = []
    for index in range(number):
        role, moment = meetings[(seed * number + index) * _STRIDE % len(meetings)]
        first, last = 1 + (steps - 2) * index // number, 1 + (steps - 2) * (index + 1) // number
        kills.append(_kill(rng, role, moment, rng.randint(first, last + (moment == "step"))))
    return kills


def draw_one(seed: int, victim: Role, *, steps: int = STEPS) -> list[Kill]:
    """Return one kill, somewhere before the last steps."""
    rng = random.Random(f"{victim} {seed}")
    return [_kill(rng, victim, rng.choice(MOMENTS[2:]), rng.randint(0, steps - 3))]


def run(experiment: Experiment, *plans: list[Kill], timeout_s: float) -> Outcome:
    """Run to the last step under fire; the kills of a plan come one after the other."""
    outcome, marks = Outcome(), Marks(experiment.run_folder)
    guns = [_Gun(plan, marks, outcome) for plan in plans]
    deadline, ports_at = time.monotonic() + timeout_s, 0.0
    launchers = [_start(experiment, marks, 0)]
    try:
        while time.monotonic() < deadline:
            launcher = launchers[-1].process
            if launcher.poll() is not None:
                outcome.causes += launchers[-1].causes()
                outcome.is_done = launcher.returncode == 0
                if outcome.is_done or len(launchers) > 3 + sum(map(len, plans)):
                    return outcome
                say(f"the launcher has ended with status {launcher.returncode} and is started again")
                launchers.append(_start(experiment, marks, len(launchers)))
            if time.monotonic() > ports_at:
                outcome.ports |= listening_ports(descendants(launcher.pid))
                ports_at = time.monotonic() + _PORTS_S
            marks.look()
            for gun in guns:
                gun.look(launchers[-1].process.pid)
            time.sleep(_LOOK_S)
        say(f"not done within {timeout_s:g} s; waiting for {[gun.waits_for for gun in guns]}, {marks.newest}")
        return outcome
    finally:
        kill_tree(launchers[-1].process.pid)
        launchers[-1].process.wait(120)


def _start(experiment: Experiment, marks: Marks, number: int) -> Launcher:
    marks.add("start", -1)
    return experiment.launch(number)


class _Gun:
    """Fires the kills of a plan one after the other, each when its moment has come since the last one."""

    def __init__(self, plan: list[Kill], marks: Marks, outcome: Outcome) -> None:
        self._plan = list(plan)
        self._marks = marks
        self._outcome = outcome
        self._first = 0
        """The marks before it are those of the last kill."""
        self._due_at: float | None = None

    @property
    def waits_for(self) -> str:
        """Describe the next kill."""
        return str(self._plan[0]) if self._plan else "nothing"

    def look(self, launcher: int) -> None:
        """Fire if it is time."""
        if not self._plan:
            return
        kill, now = self._plan[0], time.monotonic()
        if self._due_at is None and not any(kill.is_due(mark) for mark in self._marks.seen[self._first :]):
            return
        self._due_at = self._due_at or now
        victims = [pid for pid in find(kill.victim, launcher) if is_alive(pid)]
        if victims:
            self._fire(kill, victims[int(kill.pick * len(victims))])
        elif now > self._due_at + _LATE_S:
            say(f"no {kill.victim} to kill")
            self._next()

    def _fire(self, kill: Kill, pid: int) -> None:
        name = describe(pid)
        send_signal(pid, signal.SIGKILL)
        say(f"kill -9 {kill.victim} {name}, {self._marks.newest}")
        self._outcome.faults.append(f"kill_{kill.victim}")
        self._next()
        self._outcome.num_fatal += kill.victim in MAY_BE_FATAL
        if kill.victim in FATAL:
            self._marks.add("start", -1)

    def _next(self) -> None:
        self._plan.pop(0)
        self._first = len(self._marks.seen)
        self._due_at = None


def _kill(rng: random.Random, victim: Role, moment: Moment, step: int) -> Kill:
    return Kill(victim, moment, step, delay_s=rng.uniform(0, SPAN_S[moment]), pick=rng.random())
