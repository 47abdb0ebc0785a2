from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from testing_graphs import ENGINES, Actor, ppo, refused

from arealite.core import names
from arealite.core.names import GraphBuilder, MFCDef, ModelInterfaceType, named, register_agent, register_mfc

GENERATE, INFERENCE, TRAIN_STEP = ModelInterfaceType
CONFIG: Any = SimpleNamespace(train_dataset=SimpleNamespace(batch_size=32))
GEN = MFCDef("actor-gen", GENERATE, "generate", n_seqs=32)
TRAIN = MFCDef("actor-train", TRAIN_STEP, "ppo_update", n_seqs=32)
KEYS = {"rewards", "logprobs", "input_ids"}


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(names, "_REGISTERED", {"mfc": {}, "agent": {}})
    yield


def builder(*flows: tuple[MFCDef, MFCDef, Any]) -> GraphBuilder:
    made = GraphBuilder({"actor": Actor}, publishes="actor")
    for flow in flows:
        made.add_mfc_dataflow(*flow)
    return made


def test_the_original_words_make_the_same_graph() -> None:
    """Every flow of PPO with a critic, in the words of the original."""
    declared = ppo()
    definitions = {}
    for call in declared.calls:
        interface = ModelInterfaceType(call.interface)
        model = {"actor_gen": "actor-gen", "advantages": "actor-inf"}.get(call.name, call.name.replace("_", "-"))
        method = call.run.__name__ if call.run is not None else "generate"
        definitions[call.name] = MFCDef("reward" if call.name == "advantages" else model, interface, method)
    made = GraphBuilder(ENGINES | {"reward": Actor}, publishes="actor")
    for call in declared.calls:
        for maker, keys in declared.needs[call.name].items():
            made.add_mfc_dataflow(definitions[maker], definitions[call.name], keys)
    graph = made.build(CONFIG)
    renamed = {"advantages": "reward_inf"}
    assert [call.name for call in graph.order()] == [renamed.get(call.name, call.name) for call in declared.order()]
    for call in declared.calls:
        ours = graph.named[renamed.get(call.name, call.name)]
        assert (ours.run, ours.interface, {*ours.outputs}) == (call.run, call.interface, {*call.outputs})
        assert {*ours.inputs} == {*call.inputs}


def test_registered_functions_are_found_by_name() -> None:
    @register_mfc("ppo-update")
    def own(engine: Any, batch: Any, kl_ctl: float) -> dict[str, float]:
        return {}

    update = MFCDef("actor-train", TRAIN_STEP, "ppo-update", func_kwargs={"kl_ctl": 0.1})
    call = builder((GEN, update, KEYS)).build(CONFIG).named["actor_train"]
    assert (call.run, call.kwargs, call.inputs) == (own, {"kl_ctl": 0.1}, ("input_ids", "logprobs", "rewards"))
    of_a_module = MFCDef("actor-train", TRAIN_STEP, "operator:or_")
    assert builder((GEN, of_a_module, KEYS)).build(CONFIG).named["actor_train"].run is __import__("operator").or_


def test_agents(tmp_path: Path) -> None:
    @register_agent("math-single-step")
    class Agent: ...

    register_agent("math-single-step")(Agent)
    assert named("agent", "math-single-step", key="agent") is Agent
    (tmp_path / "own_agent_of_names.py").write_text("class Own: ...\n")
    assert named("agent", f"{tmp_path}/own_agent_of_names.py:Own", key="agent").__name__ == "Own"


def twice() -> None:
    register_agent("math")(list)
    register_agent("math")(dict)


def unknown_agent() -> None:
    register_agent("math-code")(list)
    named("agent", "math_code", key="make_workflow")


MISTAKES: list[tuple[Callable[[], object], str, str]] = [
    (
        lambda: builder((GEN, MFCDef("actor-train", TRAIN_STEP, "ppo_update", n_seqs=64), KEYS)).build(CONFIG),
        "n_seqs of call actor_train",
        "64 and 32",
    ),
    (
        lambda: builder(
            (MFCDef("actor-gen", GENERATE, "generate", func_kwargs={"gconfig": 1, "tokenizer": 2}), TRAIN, KEYS)
        ).build(CONFIG),
        "call actor_gen",
        "gconfig and tokenizer",
    ),
    (
        lambda: builder((MFCDef("prompt", INFERENCE, "load"), GEN, {"prompt_mask", "prompt"})),
        "call actor_gen",
        "prompt and prompt_mask of prompt_inf",
    ),
    (lambda: builder((GEN, TRAIN, "rewards")), "keys from actor_gen to actor_train", "the text 'rewards'"),
    (
        lambda: builder((GEN, TRAIN, KEYS), (GEN, MFCDef("actor", TRAIN_STEP, "update"), KEYS)),
        "each call",
        f"{TRAIN} and {MFCDef('actor', TRAIN_STEP, 'update')}",
    ),
    (
        lambda: builder((GEN, MFCDef("actor-train", TRAIN_STEP, "ppo_updates"), KEYS)).build(CONFIG),
        "model_function_name of actor_train",
        "ppo_updates",
    ),
    (twice, "math", "<class 'list'> and <class 'dict'>"),
    (unknown_agent, "make_workflow", "math_code"),
    (lambda: named("agent", "math", key="agent.type"), "agent.type", "math"),
    (lambda: register_agent("a:b"), "a registered name", "a:b"),
]


@pytest.mark.parametrize(("make", "subject", "got"), MISTAKES)
def test_mistakes_in_the_original_words(make: Callable[[], object], subject: str, got: str) -> None:
    refused(make, subject, got)
