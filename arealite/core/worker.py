"""One rank of a group: a Ray actor that holds an engine for each role of its group and runs what it is told."""

from __future__ import annotations

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
from arealite.core.batch import Piece, Pieces, RemoteBatch, cut, join, pack, restored
from arealite.launcher.plan.layout import Group
from arealite.utils import heartbeat, trace
from arealite.utils.distributed import is_agreed
from arealite.utils.network import hold_port, host_ip, port_of

Run = str | Callable[..., Any]
"""A method or property of the role's engine by name, or `f(engine, batch, **kwargs)`."""


Redo = Literal["never", "until_done", "in_step", "always"]
"""When workers that replace lost ones do a call: never (its caller gets an error), while it has not ended (it changes
nothing), until its step is over, or always (it makes the engine what it is)."""


@dataclass(frozen=True)
class Call:
    """What a group is told to do."""

    name: str
    role: str
    run: Run
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch: RemoteBatch | None = None
    output: str | None = None  # name of the tensor that it returns; one that ends in `?` may be absent
    after: Sequence[Pieces] = ()  # of calls that must have ended before it starts
    redo: Redo = "in_step"
    timeout_s: float | None = None  # None is that of the group
    life: int | None = None  # `num_respawns` of the group when its arguments were made, if only those workers can do it
    layout: tuple[Mapping[str, str], ...] = ()  # of a part: keys of each piece by their names in the batch
    makes: bool = False  # whether `run` takes nothing and returns the role's engine

    def for_ranks(self, layout: Sequence[Mapping[str, str]]) -> Call:
        """Return what each rank needs; the pieces of its parts follow as arguments, part after part."""
        return replace(self, batch=None, after=(), layout=tuple(layout))


@dataclass(frozen=True)
class Outcome:
    """What became of a call on one rank: its plain value, or its error; names of the columns that it made."""

    value: Any = None
    made: tuple[str, ...] = ()
    num_bytes: int = 0  # received and made
    error: BaseException | None = None
    is_agreed: bool = False
    trace: str = ""
    """Lines of the user's that the error has passed."""


@dataclass(frozen=True, eq=False)
class GroupSpec(Group):
    """What a group is made of."""

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
        """Return this node's name, the address by which `toward` reaches it and a port that is free there."""
        self._holder = hold_port("0.0.0.0")  # until rank 0 of the group listens on it
        return os.uname().nodename, host_ip(toward), port_of(self._holder)

    def meet(self, environment: Mapping[str, str]) -> None:
        """Take the place of a rank in the group's world, with the variables that torchrun sets."""
        for name in [one for one in os.environ if one.startswith("TORCHELASTIC")]:
            del os.environ[name]  # with its store nobody would host the group's
        os.environ.update(environment)
        self._holder.close()

    def call(self, told: bytes, num_parts: int, *pieces: Piece) -> Any:
        """Do a pickled Call; return its pickled Outcome, and a piece of what it made for each part of the batch."""
        results: list[Piece] = [{}] * num_parts
        try:
            outcome = self._do(pickle.loads(told), pieces, results)
        except Exception as error:  # other ranks must not wait for this one in vain
            traceback.print_exc()
            where = [*users_code(error), f"  the whole traceback: {self._log}"]
            outcome = Outcome(error=portable(error), is_agreed=is_agreed(error), trace="\n".join(where))
        packed = _pickled(outcome)
        heartbeat.tick()
        return [packed, *results] if results else packed

    def _do(self, call: Call, pieces: Sequence[Piece], results: list[Piece]) -> Outcome:
        """Do a call, and set the piece of what it made of each part."""
        if call.makes:
            assert callable(call.run), call.run
            self._engines[call.role] = call.run()
            return Outcome()
        engine, name = self._engines[call.role], getattr(call.run, "__name__", call.run)
        run = getattr(engine, call.run) if isinstance(call.run, str) else functools.partial(call.run, engine)
        kwargs = {
            key: self._engines[one.role] if isinstance(one, RoleName) else one for key, one in call.kwargs.items()
        }
        with trace.span(f"{call.role}.{name}"):
            if not call.layout:
                return Outcome(run(*call.args, **kwargs) if callable(run) else run)
            size = len(call.layout)
            parts = restored(call.layout, [pieces[i : i + size] for i in range(0, len(pieces), size)])
            batch = join(parts)
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
            results[:] = [pack(one, made) for one in cut(batch, parts, made)] if made else results
            sizes = [array.values.nbytes for piece in (*pieces, *results) for array in piece.values()]
            return Outcome(value, made, sum(sizes))

    def snapshot(self) -> dict[str, Any]:
        """Return what each role that is trained needs to continue from here; others are read from their path again."""
        return {role: one.snapshot() for role, one in self._engines.items() if hasattr(one, "optimizer")}

    def restore(self, snapshots: Mapping[str, Any]) -> None:
        """Continue from a snapshot; engines are made and initialized as those that it was taken of."""
        for role, snapshot in snapshots.items():
            self._engines[role].restore(snapshot)


@dataclass(frozen=True)
class RoleName:
    """Stands, among the keyword arguments of a call, for the engine of another role of the group."""

    role: str


def _is_as_before(tensor: torch.Tensor, known: torch.Tensor | None, version: int) -> bool:
    """Tell whether a tensor is the known one, and nothing was written into it since its `_version`."""
    return tensor is known and tensor._version == version


def _pickled(outcome: Outcome) -> bytes:
    """Return an outcome as the master reads it; a value that can't be pickled is the caller's mistake."""
    try:
        return cloudpickle.dumps(outcome)
    except Exception as error:  # whatever the value's class does
        kind = type(outcome.value).__name__
        change = "Return a tensor, numbers or plain data."
        told = f"a call must return what can be pickled: got {kind}, and {error}. {change}"
        return cloudpickle.dumps(Outcome(error=TypeError(told)))


def portable(error: BaseException) -> BaseException:
    """Return an error that the master can read."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does
        told = RuntimeError(f"{type(error).__name__}: {error}")
        vars(told)["__notes__"] = getattr(error, "__notes__", [])
        return told
    return error


def write_output_to(path: Path) -> None:
    """Append what this process writes to a log beside those of other processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
