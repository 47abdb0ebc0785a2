"""The declared dataflow of a step: model function calls, and edges derived from the keys they read and make.

A graph is checked on creation and immutable. The master decides where and when a call runs.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from arealite.api.config.checks import check_workers
from arealite.api.errors import ConfigError, require
from arealite.launcher.plan.layout import make_layout
from arealite.utils.terminal import listed, nearest

if TYPE_CHECKING:
    import torch

    from arealite.api.config.experiment import BaseExperimentConfig

    Outcome = torch.Tensor | dict[str, float] | None
    """A tensor is the only output; None if outputs were added to the batch; a dict contains metrics."""

SOURCES = ("rollout", "data")
"""Roles of a source: episodes, or rows of the data set."""
Interface = Literal["generate", "inference", "train_step"]


@dataclass(frozen=True)
class ModelFunctionCall:
    """A call of a step: a function of an engine, the keys that it reads, and the keys that it makes.

    A key that ends in `?` may be absent. Raises ConfigError for a call that fits no graph.
    """

    name: str
    role: str
    """Whose engine runs it; `rollout` or `data` for the one source."""
    interface: Interface
    run: Callable[..., Outcome] | None = None
    """A method of the engine's class, or a function `f(engine, batch, **kwargs)`; None for the source."""
    inputs: tuple[str, ...] = ()
    """The keys of the batch that `run` sees."""
    outputs: tuple[str, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    after: tuple[str, ...] = ()
    """Names of calls that must end before this one, besides the makers of its inputs."""

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "after"):
            words = unique_words(getattr(self, name), f"{name} of call {self.name}")
            object.__setattr__(self, name, words)
        object.__setattr__(self, "kwargs", dict(self.kwargs))
        _check_call(self)

    @property
    def is_source(self) -> bool:
        """True for the call whose outputs the master collects itself."""
        return self.interface == "generate"

    def inputs_among(self, keys: Collection[str]) -> tuple[str, ...]:
        """Return the inputs that exist, without `?`; ValueError names a required one that `keys` lacks."""
        return self._among(self.inputs, keys, "read")

    def outputs_among(self, keys: Collection[str]) -> tuple[str, ...]:
        """Return the outputs that exist, without `?`; ValueError names a required one that `keys` lacks."""
        return self._among(self.outputs, keys, "make")

    def _among(self, declared: tuple[str, ...], keys: Collection[str], verb: str) -> tuple[str, ...]:
        missing = [key for key in declared if not key.endswith("?") and key not in keys]
        if missing:
            raise ValueError(
                f"call {self.name} must {verb} {', '.join(missing)}: got only {', '.join(sorted(keys)) or 'nothing'}. "
                f"Correct what makes it, or declare that it may be absent: {missing[0]}?"
            )
        return tuple(key.removesuffix("?") for key in declared if key.removesuffix("?") in keys)


MFC = ModelFunctionCall


@dataclass(frozen=True, eq=False)
class DataFlowGraph:
    """The calls of a step, the engine class of each role, and the role whose weights the servers get.

    Raises ConfigError for every mistake that needs no config to be seen.
    """

    calls: Sequence[ModelFunctionCall]
    engines: Mapping[str, type]
    publishes: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", tuple(self.calls))
        object.__setattr__(self, "engines", MappingProxyType(dict(self.engines)))
        _check_names(self)
        _check_engines(self)
        _check_keys(self)
        _check_training(self)

    def check(self, config: BaseExperimentConfig) -> None:
        """Raise ConfigError unless the config has workers, a block per role, and an optimizer per role that trains."""
        check_workers(config.workers)
        for call in self.calls:
            block = "train_dataset" if call.role == "data" else call.role
            require(
                getattr(config, block, None) is not None,
                f"the config must have a block {block}, as call {call.name} is of role {call.role}: got none. "
                f'Write "{block}: {{}}", or declare a graph without this call.',
            )
        for call in self.train_steps:
            require(
                getattr(getattr(config, call.role), "optimizer", None) is not None,
                f"{call.role}.optimizer must be a block, as call {call.name} trains: got null. Set its lr, or declare "
                "the call as inference.",
            )
        make_layout(config, self.engines)

    @cached_property
    def named(self) -> Mapping[str, ModelFunctionCall]:
        """The calls by name."""
        return {call.name: call for call in self.calls}

    @cached_property
    def source(self) -> ModelFunctionCall:
        """The call whose batch the master collects."""
        return next(call for call in self.calls if call.is_source)

    @cached_property
    def train_steps(self) -> tuple[ModelFunctionCall, ...]:
        """The calls that train."""
        return tuple(call for call in self.calls if call.interface == "train_step")

    @cached_property
    def makers(self) -> Mapping[str, str]:
        """The name of the call that makes each key."""
        return {key.removesuffix("?"): call.name for call in self.calls for key in call.outputs}

    @cached_property
    def needs(self) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """By call, the calls that must end before it begins, with the keys that it reads of each."""
        needs = {}
        for call in self.calls:
            read: dict[str, tuple[str, ...]] = {}
            for key in call.inputs:
                maker = self.makers[key.removesuffix("?")]
                read[maker] = (*read.get(maker, ()), key)
            needs[call.name] = dict.fromkeys(call.after, ()) | read
        return needs

    @cached_property
    def ancestors(self) -> Mapping[str, frozenset[str]]:
        """By call, all calls that end before it begins."""
        ancestors: dict[str, frozenset[str]] = {}
        for call in self.order():
            needs = self.needs[call.name]
            ancestors[call.name] = frozenset(needs).union(*(ancestors[name] for name in needs))
        return ancestors

    def order(self) -> list[ModelFunctionCall]:
        """Return the calls in topological order."""
        try:
            return [self.named[name] for name in TopologicalSorter(self.needs).static_order()]
        except CycleError as error:
            got = " -> ".join(error.args[1])
            raise ConfigError(f"calls must not wait for each other: got {got}. Remove a key or an after.") from None

    def direct_needs(self, name: str) -> list[str]:
        """Return the calls that must end before a call, except those that end before another of them."""
        needs = self.needs[name]
        return [before for before in needs if not any(before in self.ancestors[needed] for needed in needs)]

    def __str__(self) -> str:
        """Return the calls in their order, each with its role, the keys that it reads, and those that it makes."""
        lines = ["calls of a step"]
        for call in self.order():
            made = ", ".join(call.outputs) or ("weights" if call in self.train_steps else "metrics")
            line = f"{call.name} ({call.role}): {', '.join(call.inputs)} -> {made}".replace(":  ->", ": ->")
            lines += textwrap.wrap(line, 118, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
        return "\n".join(lines)


def unique_words(names: Iterable[str], what: str) -> tuple[str, ...]:
    """Return names as a tuple of unique words; refuse a string, which would be split into letters."""
    require(not isinstance(names, str), f'{what} must be a tuple: got the text {names!r}. Write ("{names}",).')
    words = tuple(names)
    plain = [str(word).removesuffix("?") for word in words]
    for name in plain:
        require(name.isidentifier(), f"{what} must be words of letters, digits and _: got {name!r}. Correct it.")
        require(plain.count(name) == 1, f"{what} must name each once: got {name} twice. Remove one.")
    return words


def _check_call(call: ModelFunctionCall) -> None:
    """Refuse a call that is invalid in every graph."""
    for what, name in (("name", call.name), ("role", call.role)):
        change = "Metrics and config keys contain it: use letters, digits and _ only."
        require(name.isidentifier(), f"the {what} of a call must be a word: got {name!r}. {change}")
    require(
        call.interface in get_args(Interface),
        f"the interface of call {call.name} must be generate, inference or train_step: got {call.interface}. "
        f"{nearest(call.interface, get_args(Interface))}",
    )
    require(
        call.is_source == (call.role in SOURCES),
        f"the role of a call must be rollout or data if it generates, and only then: got {call.role} of call "
        f"{call.name}, which is {call.interface}. Correct one of them.",
    )
    if call.is_source:
        extra = [name for name in ("run", "inputs", "kwargs", "after") if getattr(call, name)]
        change = "Remove it, as the master itself collects the batch."
        require(not extra, f"call {call.name} must have only outputs: got {listed(extra)}. {change}")
    else:
        change = "Pass a method of the engine's class, or f(engine, batch, **kwargs)."
        require(callable(call.run), f"run of call {call.name} must be a function: got {call.run}. {change}")
        change = "Name all that its function reads."
        require(bool(call.inputs), f"call {call.name} must read from the batch: got no inputs. {change}")


def _check_names(graph: DataFlowGraph) -> None:
    """Require unique names, exactly one source, and existing calls in `after`."""
    names = [call.name for call in graph.calls]
    for name in graph.named:
        num = names.count(name)
        require(num == 1, f"each call must have a name of its own: got {num} calls {name}. Rename all but one.")
    sources = [call.name for call in graph.calls if call.is_source]
    change = "Remove all but one." if sources else "Add a call that generates what others read."
    require(
        len(sources) == 1, f"a graph must have one source, of role rollout or data: got {listed(sources)}. {change}"
    )
    for call in graph.calls:
        for name in call.after:
            change = nearest(name, graph.named)
            require(name in graph.named, f"after of call {call.name} must name a call: got {name}. {change}")


def _check_engines(graph: DataFlowGraph) -> None:
    """Require an engine for each role, and functions that fit the engines."""
    for call in graph.calls:
        if not call.is_source:
            check_role(call.name, call.role, graph.engines)
            _check_run(call, graph.engines[call.role])


def check_role(name: str, role: str, engines: Mapping[str, type]) -> None:
    """Require an engine for the role of the call `name`."""
    change = nearest(role, engines, otherwise="Add its class to engines.")
    given = f"got engines of {listed(engines)}"
    require(role in engines, f"role {role} of call {name} must have an engine: {given}. {change}")


def _check_run(call: ModelFunctionCall, engine: type) -> None:
    """Require a method of the engine's class or its bases, or a function, that accepts the arguments."""
    assert call.run is not None
    name = getattr(call.run, "__qualname__", repr(call.run))
    owner = name.rpartition(".")[0]
    is_method = bool(owner) and not owner.endswith("<locals>")
    require(
        not is_method or any(vars(base).get(call.run.__name__) is call.run for base in engine.__mro__),
        f"run of call {call.name} must be a method that the engine of {call.role} has: got {name}, and engine "
        f"{engine.__name__}. Use a method of this class, or correct the role.",
    )
    try:
        inspect.signature(call.run).bind(None, None, **call.kwargs)
    except TypeError as error:
        change = f"Hyperparameters stand in the config, block {call.role}." if is_method else "Correct kwargs."
        raise ConfigError(
            f"run of call {call.name} must take (engine, batch, **kwargs): got {name}, {error}. {change}"
        ) from error


def _check_keys(graph: DataFlowGraph) -> None:
    """Require that each key has exactly one maker."""
    optional = {key for call in graph.calls for key in call.outputs if key.endswith("?")}
    for key in graph.makers:
        makers = [call.name for call in graph.calls if {key, f"{key}?"} & {*call.outputs}]
        require(
            len(makers) == 1, f"a key must have one maker: got {key} of {listed(makers)}. Rename it in one of them."
        )
    for call in graph.calls:
        for key in call.inputs:
            change = nearest(key.removesuffix("?"), graph.makers, otherwise="Add it to the outputs of a call.")
            is_made = key.removesuffix("?") in graph.makers
            require(is_made, f"an input must be made by a call: got {key} of {call.name}. {change}")
            require(
                f"{key}?" not in optional,
                f"an input that may be absent must end in a question mark: got {key} of {call.name}, and {key}? of "
                f"{graph.makers[key.removesuffix('?')]}. Add the mark, or remove it there.",
            )


def _check_training(graph: DataFlowGraph) -> None:
    """Require an order between the train steps of a role and its other calls, and that the published role trains."""
    for step in graph.train_steps:
        for call in graph.calls:
            is_ordered = call.name in graph.ancestors[step.name] or step.name in graph.ancestors[call.name]
            if call.role != step.role or call == step or is_ordered:
                continue
            later = f'Add after=("{step.name}",) to {call.name}'
            require(
                call not in graph.train_steps,
                f"train steps of a role must have an order: got {step.name} and {call.name} of {call.role}. {later}.",
            )
            raise ConfigError(
                f"call {call.name} must begin after {step.name}, which trains its role {call.role}, or end before: got "
                f'no order. {later} for the new weights, or after=("{call.name}",) to {step.name} for the old ones.'
            )
    roles = {call.role: None for call in graph.train_steps}
    change = f"Use {' or '.join(roles)}." if roles else "Declare a call that trains."
    is_trained = graph.publishes in roles
    require(is_trained, f"publishes must be a role with a train_step: got {graph.publishes}. {change}")
