"""The original Core's spelling of a graph: `MFCDef`, `add_mfc_dataflow`, and registered names for YAML.

A builder yields a DataFlowGraph. Code can pass classes and functions instead, and `module:NAME` needs no decorator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from arealite.api.errors import require
from arealite.core.graph import DataFlowGraph, ModelFunctionCall, check_role, unique_words
from arealite.reward.functions import load_named
from arealite.utils.terminal import listed, nearest

if TYPE_CHECKING:
    from arealite.api.config.experiment import BaseExperimentConfig

Kind = Literal["mfc", "agent"]
T = TypeVar("T", bound=Callable[..., Any])
_REGISTERED: dict[Kind, dict[str, Callable[..., Any]]] = {"mfc": {}, "agent": {}}


class ModelInterfaceType(StrEnum):
    """Use of the model by a call."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"


_ENDINGS = {"generate": "gen", "inference": "inf", "train_step": "train"}


@dataclass(frozen=True)
class MFCDef:
    """A call in the original's spelling; a GraphBuilder resolves its function and its keys."""

    model_name: str
    """A role, also with the interface behind it, e.g. `actor-train`; generation always runs on the servers."""
    interface_type: ModelInterfaceType
    model_function_name: str
    """A name of `register_mfc`, `module:FUNCTION`, or a method of the role's engine, searched in this order."""
    n_seqs: int | None = None
    """Must be `train_dataset.batch_size`, as each call gets the whole batch."""
    func_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def _model(self) -> str:
        return re.sub(r"[-_](train|inf|gen)$", "", self.model_name).replace("-", "_")

    @property
    def role(self) -> str:
        return "rollout" if self.interface_type == ModelInterfaceType.GENERATE else self._model

    @property
    def name(self) -> str:
        """The name of the call, e.g. `actor_train`."""
        return f"{self._model}_{_ENDINGS.get(self.interface_type, self.interface_type)}"


class GraphBuilder:
    """Collects flows between definitions, then yields the graph."""

    def __init__(self, engines: Mapping[str, type], publishes: str) -> None:
        self._engines, self._publishes = dict(engines), publishes
        self._definitions: dict[str, MFCDef] = {}
        self._flows: list[tuple[MFCDef, MFCDef, tuple[str, ...]]] = []

    def add_mfc_dataflow(self, src: MFCDef, dst: MFCDef, keys: Iterable[str]) -> None:
        """Pass `keys` from `src` to `dst`. Raises ConfigError for two definitions of a name, or keys to a source."""
        for mfc in (src, dst):
            known = self._definitions.setdefault(mfc.name, mfc)
            require(known == mfc, f"each call must have one definition: got {known} and {mfc}. Correct one of them.")
        flow = unique_words(sorted(keys) if isinstance(keys, Set) else keys, f"keys from {src.name} to {dst.name}")
        require(
            dst.role != "rollout",
            f"call {dst.name} must be given no keys, as episodes begin with a row of train_dataset: got "
            f"{listed(flow)} of {src.name}. Remove this flow.",
        )
        self._flows.append((src, dst, flow))

    def build(self, config: BaseExperimentConfig) -> DataFlowGraph:
        """Return the graph, checked except for `DataFlowGraph.check`. Raises ConfigError for an unknown name."""
        for mfc in self._definitions.values():
            size = config.train_dataset.batch_size
            require(
                mfc.n_seqs in (None, size),
                f"n_seqs of call {mfc.name} must be train_dataset.batch_size, as a call gets the whole batch: got "
                f"{mfc.n_seqs} and {size}. Remove n_seqs.",
            )
            require(
                mfc.role != "rollout" or not mfc.func_kwargs,
                f"call {mfc.name} must have no func_kwargs, as gconfig and tokenizer_path say how servers generate: "
                f"got {listed(mfc.func_kwargs)}. Remove them.",
            )
        return DataFlowGraph([*map(self._call, self._definitions.values())], self._engines, self._publishes)

    def _call(self, mfc: MFCDef) -> ModelFunctionCall:
        read = dict.fromkeys(key for _, dst, keys in self._flows if dst == mfc for key in keys)
        made = dict.fromkeys(key for src, _, keys in self._flows if src == mfc for key in keys)
        keys = tuple(read), tuple(key for key in made if f"{key}?" not in made)
        run = None if mfc.role == "rollout" else self._function(mfc)
        return ModelFunctionCall(mfc.name, mfc.role, str(mfc.interface_type), run, *keys, mfc.func_kwargs)  # type: ignore[arg-type]

    def _function(self, mfc: MFCDef) -> Callable[..., Any]:
        check_role(mfc.name, mfc.role, self._engines)
        engine = self._engines[mfc.role]
        if mfc.model_function_name not in _REGISTERED["mfc"] and hasattr(engine, mfc.model_function_name):
            return getattr(engine, mfc.model_function_name)
        methods = [name for name in dir(engine) if not name.startswith("_")]
        return named("mfc", mfc.model_function_name, key=f"model_function_name of {mfc.name}", others=methods)


def _register(kind: Kind, name: str) -> Callable[[T], T]:
    change = f'Write e.g. @register_{kind}("my-{kind}").'
    require(
        isinstance(name, str) and ":" not in name, f"a registered name must be a text without ':': got {name}. {change}"
    )

    def register(what: T) -> T:
        known = _REGISTERED[kind].setdefault(name, what)
        change = "Rename one of them."
        require(known is what, f"{name} must be the name of one {kind}: got {known!r} and {what!r}. {change}")
        return what

    return register


register_mfc = partial(_register, "mfc")
"""Gives a function `f(engine, batch, **kwargs)` a name for MFCDef."""
register_agent = partial(_register, "agent")
"""Gives a workflow's class, made as `Agent(gconfig, tokenizer)`, a name for Master."""


def named(kind: Kind, name: str, *, key: str, others: Iterable[str] = ()) -> Callable[..., Any]:
    """Return the object that `key` names: a registered name, `module:NAME` or `FILE.py:NAME`.

    Raises ConfigError for an unknown name, with the nearest name, also of `others`.
    """
    if ":" in name:
        return load_named(name, key=key, kind="function" if kind == "mfc" else "class")
    known = _REGISTERED[kind]
    change = nearest(
        name,
        [*known, *others],
        otherwise=f'Import the module that has @register_{kind}("{name}"), or write module:NAME.',
    )
    require(name in known, f"{key} must be a registered {kind} or module:NAME: got {name}. {change}")
    return known[name]
