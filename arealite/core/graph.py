"""The declared dataflow of a step: model function calls, and edges derived from the keys they read and make.

A graph is checked on creation and immutable. The master decides where and when a call runs.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from arealite.api.errors import ConfigError
from arealite.core import declaration
from arealite.core.declaration import Interface
from arealite.launcher.plan.layout import make_layout

if TYPE_CHECKING:
    import torch

    from arealite.api.config.experiment import BaseExperimentConfig

    Outcome = torch.Tensor | dict[str, float] | None
    """A tensor is the one output, None says that outputs were added to the batch, and a dict holds metrics."""

Edge = tuple[str, str, tuple[str, ...]]
"""A call, one that needs it, and the keys that pass; none if only `after` says so."""


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
    """All that `run` sees of the batch."""
    outputs: tuple[str, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    after: tuple[str, ...] = ()
    """Names of calls that must end before, where no key says so."""

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "after"):
            words = declaration.words(getattr(self, name), f"{name} of call {self.name}")
            object.__setattr__(self, name, words)
        object.__setattr__(self, "kwargs", dict(self.kwargs))
        declaration.check_call(self)

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

    Raises ConfigError for every mistake that can be seen without a config.
    """

    calls: Sequence[ModelFunctionCall]
    engines: Mapping[str, type]
    publishes: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", tuple(self.calls))
        object.__setattr__(self, "engines", MappingProxyType(dict(self.engines)))
        declaration.check_names(self)
        declaration.check_engines(self)
        declaration.check_keys(self)
        declaration.check_training(self)

    def check(self, config: BaseExperimentConfig) -> None:
        """Raise ConfigError if the config of an experiment can't run this graph."""
        declaration.check_blocks(self, config)
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
        found = {}
        for call in self.calls:
            read: dict[str, tuple[str, ...]] = {}
            for key in call.inputs:
                maker = self.makers[key.removesuffix("?")]
                read[maker] = (*read.get(maker, ()), key)
            found[call.name] = dict.fromkeys(call.after, ()) | read
        return found

    @cached_property
    def ancestors(self) -> Mapping[str, frozenset[str]]:
        """By call, all calls that end before it begins."""
        found: dict[str, frozenset[str]] = {}
        for call in self.order():
            found[call.name] = frozenset(self.needs[call.name]).union(*(found[one] for one in self.needs[call.name]))
        return found

    def order(self) -> list[ModelFunctionCall]:
        """Return the calls in topological order, otherwise in the order of declaration."""
        try:
            TopologicalSorter(self.needs).prepare()
        except CycleError as error:
            got = self._cycle(error.args[1])
            raise ConfigError(f"calls must not wait for each other: got {got}. Remove one of them.") from None
        ordered: dict[str, ModelFunctionCall] = {}
        while left := [call for call in self.calls if call.name not in ordered]:
            following = next(call for call in left if self.needs[call.name].keys() <= ordered.keys())
            ordered[following.name] = following
        return list(ordered.values())

    def _cycle(self, path: Sequence[str]) -> str:
        """Spell the path of a cycle with the keys that pass, from the call that is declared first."""
        first = next(path.index(name) for name in self.named if name in path)
        path = [*path[first:-1], *path[:first], path[first]]
        steps = [
            f" -({', '.join(self.needs[name][before]) or 'after'})-> {name}"
            for before, name in itertools.pairwise(path)
        ]
        return path[0] + "".join(steps)

    def edges(self) -> list[Edge]:
        """Return the edges that no longer path implies, for drawings."""
        return [
            (before, name, keys)
            for name, needed in self.needs.items()
            for before, keys in needed.items()
            if not any(before in self.ancestors[other] for other in needed)
        ]

    def __str__(self) -> str:
        """Return the calls in their order, each with its role, the keys that it reads, and those that it makes."""
        lines = ["calls of a step"]
        for call in self.order():
            made = ", ".join(call.outputs) or ("weights" if call in self.train_steps else "metrics")
            told = f"{call.name} ({call.role}): {', '.join(call.inputs)} -> {made}".replace(":  ->", ": ->")
            lines += textwrap.wrap(told, 118, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
        return "\n".join(lines)
