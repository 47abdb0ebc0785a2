"""Mistakes in a declared graph, or in a config for one: each is refused, in words, before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, get_args

from arealite.api.config.checks import check_workers
from arealite.api.errors import ConfigError, require
from arealite.utils.terminal import listed, nearest

if TYPE_CHECKING:
    from arealite.api.config.experiment import BaseExperimentConfig
    from arealite.core.graph import DataFlowGraph, ModelFunctionCall

SOURCES = ("rollout", "data")
"""Roles of a source: episodes, or rows of the data set."""
Interface = Literal["generate", "inference", "train_step"]


def words(names: Iterable[str], what: str) -> tuple[str, ...]:
    """Return names as a tuple of unique words; a plain string is refused, as it would be split into letters."""
    require(not isinstance(names, str), f'{what} must be a tuple: got the text {names!r}. Write ("{names}",).')
    found = tuple(names)
    plain = [str(name).removesuffix("?") for name in found]
    for name in plain:
        require(name.isidentifier(), f"{what} must be words of letters, digits and _: got {name!r}. Correct it.")
        require(plain.count(name) == 1, f"{what} must name each once: got {name} twice. Remove one.")
    return found


def check_call(call: ModelFunctionCall) -> None:
    """Refuse a call that fits no graph."""
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


def check_names(graph: DataFlowGraph) -> None:
    """Names are unique, there is one source, and `after` names calls."""
    names = [call.name for call in graph.calls]
    for name in graph.named:
        num = names.count(name)
        require(num == 1, f"each call must have a name of its own: got {num} calls {name}. Rename all but one.")
    sources = [call.name for call in graph.calls if call.is_source]
    change = "Remove all but one." if sources else "Add a call that generates what others read."
    require(
        len(sources) == 1,
        f"a graph must have one source, of role rollout or data: got {listed(sources)}. {change}",
    )
    for call in graph.calls:
        for name in call.after:
            change = nearest(name, graph.named)
            require(name in graph.named, f"after of call {call.name} must name a call: got {name}. {change}")


def check_engines(graph: DataFlowGraph) -> None:
    """Each role has an engine and a call, and each engine what it is called with."""
    for role in graph.engines:
        has_call = any(call.role == role for call in graph.calls)
        require(has_call, f"a role with an engine must have a call: got {role}. Add one, or remove it from engines.")
    for call in graph.calls:
        if not call.is_source:
            check_role(call.name, call.role, graph.engines)
            _check_run(call, graph.engines[call.role])


def check_role(name: str, role: str, engines: Mapping[str, type]) -> None:
    """The role of the call `name` has an engine."""
    change = nearest(role, engines, otherwise="Add its class to engines.")
    given = f"got engines of {listed(engines)}"
    require(role in engines, f"role {role} of call {name} must have an engine: {given}. {change}")


def _check_run(call: ModelFunctionCall, engine: type) -> None:
    """A method is one of the engine's class or its bases, and takes what it is given."""
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


def check_keys(graph: DataFlowGraph) -> None:
    """Each key that is made is made once and read, and each that is read is made."""
    optional = {key for call in graph.calls for key in call.outputs if key.endswith("?")}
    for key, maker in graph.makers.items():
        makers = [call.name for call in graph.calls if {key, f"{key}?"} & {*call.outputs}]
        require(
            len(makers) == 1, f"a key must have one maker: got {key} of {listed(makers)}. Rename it in one of them."
        )
        is_read = any({key, f"{key}?"} & {*call.inputs} for call in graph.calls)
        change = "Remove it, or add it to the inputs of a call."
        require(is_read, f"an output must be read by a call: got {key} of {maker}. {change}")
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


def check_training(graph: DataFlowGraph) -> None:
    """Every call of a role is ordered relative to its train steps, and the published role trains."""
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


def check_blocks(graph: DataFlowGraph, config: BaseExperimentConfig) -> None:
    """The config has workers, a block for each role, and an optimizer for each that trains."""
    check_workers(config.workers)
    for call in graph.calls:
        block = "train_dataset" if call.role == "data" else call.role
        require(
            getattr(config, block, None) is not None,
            f"the config must have a block {block}, as call {call.name} is of role {call.role}: got none. "
            f'Write "{block}: {{}}", or declare a graph without this call.',
        )
    for call in graph.train_steps:
        require(
            getattr(getattr(config, call.role), "optimizer", None) is not None,
            f"{call.role}.optimizer must be a block, as call {call.name} trains: got null. Set its lr, or declare the "
            "call as inference.",
        )
