"""A rank of a group: a Ray actor that holds an engine for each role of its group and runs calls on them."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from ray import cloudpickle

from arealite.api.script import users_code
from arealite.core.batch import Pieces, RemoteBatch, Share, cut, joined, restored, whole
from arealite.launcher.plan.layout import Group
from arealite.utils import heartbeat, trace
from arealite.utils.network import hold_port, host_ip, port_of
from arealite.utils.packed import Piece, pack

Run = str | Callable[..., Any]
"""A method or property of the role's engine by name, or `f(engine, batch, **kwargs)`."""


Redo = Literal["never", "until_done", "in_step", "always"]
"""Replay of a call by new workers: never (the caller gets an error), until it is done (it changes nothing), within its
step, or always (it sets up the engine)."""


@dataclass(frozen=True)
class Call:
    """A function call for all ranks of a group."""

    name: str
    role: str
    run: Run
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch: RemoteBatch | None = None
    output: str | None = None  # name of the returned tensor; optional if it ends in `?`
    after: Sequence[Pieces] = ()  # pieces of calls that must end before it starts
    redo: Redo = "in_step"
    timeout_s: float | None = None  # None is the group's
    life: int | None = None  # required `num_respawns` of the group, for a call that only those workers can run
    layout: tuple[Mapping[str, str], ...] = ()  # names in the batch to keys, for each piece of a part
    makes: bool = False  # `run` takes nothing and returns the role's engine

    def for_ranks(self, layout: Sequence[Mapping[str, str]]) -> Call:
        """Return the call as it is sent to each rank; pieces of its parts are separate arguments, part after part."""
        return replace(self, batch=None, after=(), layout=tuple(layout))


@dataclass(frozen=True)
class Outcome:
    """Result of a call on one rank: the value or the error, and the names of the columns that it made."""

    value: Any = None
    made: tuple[str, ...] = ()
    num_bytes: int = 0  # received and made
    error: BaseException | None = None
    trace: str = ""
    """Lines of the user's code in the error's traceback."""


@dataclass(frozen=True, eq=False)
class GroupSpec(Group):
    """Resources and settings of a group."""

    cpus: float  # of each worker, as Ray counts them
    memory: int  # bytes
    num_threads: int
    env: Mapping[str, str] = field(repr=False)  # may hold secrets
    log_folder: Path
    call_timeout_s: float
    max_restarts: int  # between two checkpoints

    def log(self, rank: int) -> Path:
        """Return the path of a worker's log."""
        return self.log_folder / f"{self.name}-{rank}.log"


class Worker:
    """The actor."""

    def __init__(self, spec: GroupSpec, rank: int) -> None:
        os.environ.update(spec.env)
        self._engines: dict[str, Any] = {}
        self._log = spec.log(rank)
        write_output_to(self._log)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(spec.num_threads)
        heartbeat.start(f"{spec.name}-{rank}")

    def address(self, toward: str) -> tuple[str, str, int]:
        """Return this node's name, its address as seen from `toward`, and a free port."""
        self._holder = hold_port()  # until rank 0 of the group listens on it
        return os.uname().nodename, host_ip(toward), port_of(self._holder)

    def meet(self, environment: Mapping[str, str]) -> None:
        """Become a rank of the group's world: set the variables that torchrun sets."""
        for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
            del os.environ[name]  # torch would expect torchrun to host the group's store
        os.environ.update(environment)
        self._holder.close()

    def call(self, pickled: bytes, num_made: int, *pieces: Piece | Share) -> Any:
        """Run a pickled Call; return its pickled Outcome, and a piece of its outputs for each part of the batch.

        `num_made` is the number of parts, or 0 on a rank whose outputs another rank of its block returns.
        """
        results: list[Piece] = [{}] * num_made
        try:
            outcome = self._do(pickle.loads(pickled), [*map(whole, pieces)], results)
        except Exception as error:  # other ranks must not wait for this rank
            traceback.print_exc()
            where = [*users_code(error), f"  the whole traceback: {self._log}"]
            outcome = Outcome(error=portable(error), trace="\n".join(where))
        packed = _pickled(outcome)
        heartbeat.tick()
        return [packed, *results] if results else packed

    def _do(self, call: Call, pieces: Sequence[Piece], results: list[Piece]) -> Outcome:
        """Run a call, and set `results`, unless it is empty, to the piece of its outputs for each part."""
        if call.makes:
            assert callable(call.run), call.run
            self._engines[call.role] = call.run()
            return Outcome()
        engine, name = self._engines[call.role], getattr(call.run, "__name__", call.run)
        run = getattr(engine, call.run) if isinstance(call.run, str) else functools.partial(call.run, engine)
        kwargs = {
            key: self._engines[value.role] if isinstance(value, RoleName) else value
            for key, value in call.kwargs.items()
        }
        with trace.span(f"{call.role}.{name}"):
            if not call.layout:
                return Outcome(run(*call.args, **kwargs) if callable(run) else run)
            size = len(call.layout)
            parts = restored(call.layout, [pieces[i : i + size] for i in range(0, len(pieces), size)])
            batch = joined(parts)
            before = {key: (tensor, tensor._version) for key, tensor in batch.items()}
            value = run(batch, *call.args, **kwargs)
            if isinstance(value, torch.Tensor):
                if call.output is None:
                    raise ValueError(
                        f"a tensor that a call returns must have a name: got one of {name}. Pass output=... to call, "
                        "or declare exactly one output."
                    )
                batch[call.output.removesuffix("?")], value = value, None
            elif not (call.output or "?").endswith("?") and call.output not in batch:
                kind = type(value).__name__
                raise ValueError(
                    f"{name} must return a tensor, {call.output}: got {kind}. Return it, or add it to the batch."
                )
            made = tuple(key for key, tensor in batch.items() if not _is_as_before(tensor, *before.get(key, (None, 0))))
            results[:] = [pack(part, made) for part in cut(batch, parts, made)] if made and results else results
            sizes = [array.values.nbytes for piece in (*pieces, *results) for array in piece.values()]
            return Outcome(value, made, sum(sizes))

    def snapshot(self) -> dict[str, Any]:
        """Return the state of each trained role; other roles are loaded from their path again."""
        return {role: engine.snapshot() for role, engine in self._engines.items() if hasattr(engine, "optimizer")}

    def restore(self, snapshots: Mapping[str, Any]) -> None:
        """Restore a snapshot into engines that were initialized with the same config."""
        for role, snapshot in snapshots.items():
            self._engines[role].restore(snapshot)


@dataclass(frozen=True)
class RoleName:
    """Placeholder for the engine of another role of the group in the keyword arguments of a call."""

    role: str


def _is_as_before(tensor: torch.Tensor, known: torch.Tensor | None, version: int) -> bool:
    """Return True if it is the same tensor and nothing was written into it since its `_version`."""
    return tensor is known and tensor._version == version


def _pickled(outcome: Outcome) -> bytes:
    """Pickle an outcome; a value that can't be pickled becomes the call's error."""
    try:
        return cloudpickle.dumps(outcome)
    except Exception as error:  # a value's class may raise anything
        kind = type(outcome.value).__name__
        message = f"a call must return a value that can be pickled: got {kind}, and {error}. Return plain data."
        return cloudpickle.dumps(Outcome(error=TypeError(message)))


def portable(error: BaseException) -> BaseException:
    """Return the error if pickling keeps its notes and `is_agreed`, else a RuntimeError with its text and these."""
    kept: dict[str, Any] = {name: vars(error)[name] for name in ("__notes__", "is_agreed") if name in vars(error)}
    with contextlib.suppress(Exception):  # its class may raise anything
        if kept.items() <= vars(pickle.loads(pickle.dumps(error))).items():
            return error
    plain = RuntimeError(f"{type(error).__name__}: {error}")
    vars(plain).update(kept)
    return plain


def write_output_to(path: Path) -> None:
    """Append the output of this process to a log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
