"""A group of workers: runs one call after the other, and replays the calls of the step if it loses its workers.

A thread of the master runs the group's calls in the order of submission. A call starts only when every piece of its
inputs exists: Ray does not run a rank whose argument failed, and the other ranks would block in a collective.
Invariants: a call runs on all ranks or on none; no result depends on the number of lost workers, since new workers
resume from a snapshot of the step's start, random generators included.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from arealite.api.errors import GroupLostError
from arealite.core.batch import CHANGED, Pieces, RemoteBatch
from arealite.core.records import CallRecord, CallState
from arealite.core.worker import Call, GroupSpec, Outcome
from arealite.core.world import PLACE_S, LossError, World, place
from arealite.launcher.place.ray import last_line
from arealite.utils.distributed import mark_agreed

logger = logging.getLogger("arealite.core")

_SNAPSHOT = Call("snapshot", "", "snapshot")  # begins a step
_CLOSE_S = 30.0  # for the thread to notice that its workers are gone


@dataclass(eq=False)
class Task:
    """A call, or the snapshot at the start of a step: its progress and its results."""

    call: Call
    step: int
    pieces: Pieces = field(default_factory=Pieces)  # outputs of each part
    values: Future[list[Outcome]] = field(default_factory=Future)  # outcomes of all ranks
    num_attempts: int = 0
    is_done: bool = False
    state: CallState = field(default_factory=CallState)

    def succeed(self, outcomes: list[Outcome], references: list[Any]) -> None:
        """Publish the outcomes and pieces. On a replay only the pieces are published. Values are set before pieces."""
        with CHANGED:  # `close` may fail the task meanwhile
            if not self.values.done():
                self.values.set_result(outcomes)
            self.pieces.settle(references)

    def fail(self, error: BaseException) -> None:
        """Fail all waiters, including those waiting for recomputed pieces."""
        with CHANGED:
            if not self.values.done():
                self.values.set_exception(error)
            if not self.pieces.is_settled():
                self.pieces.settle(None, error)


class WorkerGroup:
    """The workers of one or more roles. The master calls its methods."""

    def __init__(
        self, spec: GroupSpec, record: Callable[[CallRecord], None], note_incident: Callable[[str], None]
    ) -> None:
        self.spec = spec
        self.step = 0  # of the run
        self.num_respawns, self.num_replayed = 0, 0  # replaced workers, replayed calls
        self._record, self._note_incident = record, note_incident
        self._lasting: list[Task] = []  # tasks that new workers run before they get the snapshot
        self._tasks: list[Task] = []  # tasks since the snapshot, done and pending
        self._snapshots: tuple[list[Any], Any] | None = None  # references by rank, and values that keep a copy here
        self._loss: LossError | None = None  # noticed by another thread
        self._error: BaseException | None = None  # ended the group
        self._num_restarts, self._errors = 0, set[str]()  # since the last checkpoint
        self._placement = place(spec)
        self._world: World | None = None
        self._thread = Thread(target=self._run, name=f"arealite-group-{spec.name}", daemon=True)
        try:
            self._form_world()
        except LossError as loss:
            self._give_back()
            raise self._final(loss, "at the start") from loss
        self._thread.start()

    @property
    def machines(self) -> tuple[str, ...]:
        """The nodes of the ranks."""
        world = self._world  # the group's thread may unset it now
        return () if world is None else world.machines

    def add(self, role: str, make: Callable[[], Any]) -> Task:
        """Create the engine of a role on every rank."""
        return self.submit(Call(f"{role}.make", role, make, redo="always", makes=True, timeout_s=PLACE_S))

    def submit(self, call: Call) -> Task:
        """Queue a call, which every rank runs in its turn once its inputs exist; return at once."""
        task = Task(call, self.step, Pieces(make_again=self._make_again))
        with CHANGED:
            if self._error is not None:
                task.fail(self._error)
            else:
                self._tasks.append(task)
                CHANGED.notify_all()
        return task

    def begin_step(self, step: int) -> None:
        """Begin a step: after the calls so far, take a snapshot from which new workers replay the step."""
        self.step = step
        self.submit(_SNAPSHOT)

    def note_checkpoint(self) -> None:
        """Reset the count of restarts: the run would resume from this checkpoint."""
        with CHANGED:
            self._num_restarts, self._errors = 0, set()

    def close(self) -> None:
        """Stop the workers and fail pending calls."""
        self._end(GroupLostError(f"group {self.spec.name} is closed"))
        self._give_back()
        self._thread.join(_CLOSE_S)

    def _give_back(self) -> None:
        if self._world is not None:
            self._world.kill()
        remove_placement_group(self._placement)

    # The thread

    def _run(self) -> None:
        """Run tasks in order; after a loss of the workers, new workers replay the step."""
        try:
            while self._error is None:
                try:
                    if self._world is None:
                        self._form_world()
                    self._do(self._next_task())
                except LossError as loss:
                    if self._error is None:
                        self._judge(loss)
                        self._lose(loss)
        except BaseException as error:
            self._end(error)

    def _next_task(self) -> Task:
        """Wait for a pending task and return it."""
        with CHANGED:
            self._wait_for(lambda: not all(task.is_done for task in self._tasks))
            return next(task for task in self._tasks if not task.is_done)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds, with CHANGED held; raise a loss or error set by another thread."""
        CHANGED.wait_for(lambda: self._loss or self._error or condition())
        if (failure := self._loss or self._error) is not None:
            raise failure

    def _end(self, error: BaseException) -> None:
        """Fail all pending and future calls with `error`."""
        with CHANGED:
            self._error = self._error or error
            tasks, self._tasks = self._tasks, []
            CHANGED.notify_all()
        for task in tasks:
            task.fail(self._error)

    def _do(self, task: Task) -> None:
        """Run a call and publish its result."""
        call, world = task.call, self._world
        assert world is not None, "a world is formed first"
        if call is _SNAPSHOT:
            self._take_snapshot(task, world)
            return
        try:
            layout, references = self._inputs(call)
            if call.life not in (None, self.num_respawns):
                raise mark_agreed(GroupLostError(f"{call.name} must run on its own workers: they were replaced"))
            task.num_attempts += 1
            self.num_replayed += task.num_attempts > 1
            begin = time.time()
            task.state = CallState("running", begin)
            outcomes, made = world.run(call, layout, references)
        except LossError as loss:
            for column in (call.batch or {}).values() if loss.lost_piece else ():
                column.pieces.report_lost(str(loss.lost_piece))
            raise
        except Exception as error:
            if task.values.done():  # it succeeded before
                raise LossError(f"{call.name} failed when it was replayed: {error!r}", is_of_code=True) from error
            self._forget(task)
            task.fail(error)
            return
        end, attempt = time.time(), task.num_attempts
        moved_mib = sum(outcome.num_bytes for outcome in outcomes) / 2**20
        name = self.spec.name
        self._record(CallRecord(task.step, call.name, call.role, name, begin, end, moved_mib, attempt, world.machines))
        task.state = CallState("replayed" if attempt > 1 else "done", begin, end)
        task.is_done = True
        if call.redo in ("never", "until_done"):
            self._forget(task)
        task.succeed(outcomes, made)

    def _inputs(self, call: Call) -> tuple[tuple[Mapping[str, str], ...], list[list[Any]]]:
        """Wait for the inputs of a call; return the keys of a part's pieces and the references of each part."""
        batch = call.batch or RemoteBatch([])
        awaited = {*call.after, *(column.pieces for column in batch.values())}
        with CHANGED:
            self._wait_for(lambda: all(pieces.is_settled() for pieces in awaited))
            for pieces in call.after:
                pieces.result()
            layout = batch.layout()
            references = [pieces.result() for pieces in layout]
        return tuple(layout.values()), [list(part) for part in zip(*references)]

    def _forget(self, task: Task) -> None:
        with CHANGED:
            if task in self._tasks:
                self._tasks.remove(task)

    # Snapshots

    def _take_snapshot(self, task: Task, world: World) -> None:
        """Take a snapshot on every rank; copy it to this node in the background.

        Cost: each rank copies its shards to memory at the start of a step, when the group mostly waits for rollouts,
        and this node holds one snapshot of every trained role, 12 bytes per parameter, and two during the copy.
        """
        task.is_done = True
        references = world.snapshot()
        Thread(target=self._keep, args=(references, task, world), name="arealite-snapshot", daemon=True).start()

    def _keep(self, references: list[Any], task: Task, world: World) -> None:
        """Keep a copy of the snapshot on this node, which survives its ranks, and forget the calls of earlier steps."""
        try:
            values = ray.get(references, timeout=self.spec.call_timeout_s)
        except Exception as error:  # unpickling too: without snapshots the calls of all steps would be kept
            with CHANGED:
                if self._world is world and self._error is None:
                    self._loss = LossError(f"a rank took no snapshot: {last_line(error)}")
                    CHANGED.notify_all()
            return
        with CHANGED:
            if self._world is world and task in self._tasks:
                earlier = self._tasks[: self._tasks.index(task)]
                del self._tasks[: len(earlier) + 1]
                self._lasting += [done for done in earlier if done.call.redo == "always"]
                self._snapshots = references, values

    # Losses

    def _form_world(self) -> None:
        """Start workers and restore the last snapshot."""
        with CHANGED:
            if self._error is not None:  # closing the group has stopped the workers
                raise self._error
            self._world = World(self.spec, self._placement)
        self._world.meet()
        for task in self._lasting:
            self._do(task)
        if self._snapshots is not None:
            self._world.restore(self._snapshots[0])

    def _make_again(self, pieces: Pieces) -> None:
        """Replay the step, because these pieces were on a node that died."""
        with CHANGED:
            maker = next((task for task in self._tasks if task.pieces is pieces), None)
            if maker is None:
                lost = LossError("pieces of an earlier step were on a node that died")
                pieces.settle(None, self._final(lost, ""))
            elif maker.is_done:
                self._loss = LossError("pieces of this step were on a node that died")
            CHANGED.notify_all()

    def _judge(self, loss: LossError) -> None:
        """Report a loss, or raise the error that ends the run if new workers would not help."""
        with CHANGED:
            is_known = loss.is_of_code and str(loss) in self._errors
            self._errors.add(str(loss))
            self._num_restarts += 1
            if is_known or self._num_restarts > self.spec.max_restarts:
                spent = f"after {self.spec.max_restarts} restarts since the last checkpoint (workers.restarts)"
                raise self._final(loss, "a second time" if is_known else spent) from loss.__cause__
        text = (
            f"group {self.spec.name} is restarted ({self._num_restarts} of {self.spec.max_restarts} restarts) and "
            f"replays {sum(task.num_attempts > 0 for task in self._tasks)} calls of step {self.step}: {loss}"
        )
        logger.warning("%s", text)
        self._note_incident(text)

    def _lose(self, loss: LossError) -> None:
        """Stop the remaining workers and mark every task of the step as pending."""
        with CHANGED:
            self._loss, world, self._world = None, self._world, None
            cut_off = [task for task in self._tasks if task.call.redo == "never" and task.num_attempts]
            self._tasks = [task for task in self._tasks if task not in cut_off]
            for task in self._tasks:
                task.is_done = False
        for task in cut_off:  # before the workers stop, so that the peer sees the cause, not a reset connection
            task.fail(mark_agreed(GroupLostError(f"{task.call.name} must not lose its workers: {loss}")))
        if world is not None:
            world.kill()
        self.num_respawns += self.spec.num_ranks

    def _final(self, loss: LossError, when: str) -> GroupLostError:
        """Return the error that ends the run."""
        what = f"group {self.spec.name} must keep its workers: got {loss}, {when}. Look at {self.spec.log(loss.rank)}."
        return mark_agreed(GroupLostError(what))
