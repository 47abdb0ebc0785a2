import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing_graphs import ENGINES, PPO, ROLLOUT, TOKENS, Actor, ppo, refused

from arealite.api.cli_args import PPOConfig, load_expr_config
from arealite.core.graph import MFC, DataFlowGraph


def free(engine: object, batch: Any) -> None:
    """Stand for a function of a user."""


def graph(
    *changed: MFC, without: str = "", engines: dict[str, type] = ENGINES, publishes: str = "actor"
) -> DataFlowGraph:
    """Return PPO's graph with calls put in the place of those of their names, or added."""
    calls = PPO | {call.name: call for call in changed}
    return DataFlowGraph([call for call in calls.values() if call.name != without], engines, publishes)


def change(name: str, /, **fields: Any) -> MFC:
    return replace(PPO[name], **fields)


def changed(name: str, /, **fields: Any) -> DataFlowGraph:
    return graph(change(name, **fields))


def test_edges_follow_from_keys() -> None:
    graph = ppo()
    assert graph.needs["actor_inf"] == {"actor_gen": TOKENS}
    assert graph.needs["critic_train"] == {
        "actor_gen": ROLLOUT,
        "actor_inf": ("proximal_logprobs",),
        "ref_inf": ("ref_logprobs",),
        "critic_inf": ("values",),
        "advantages": ("advantages", "returns"),
    }
    assert graph.source is PPO["actor_gen"] and graph.makers["truncated"] == "actor_gen"
    assert [call.name for call in graph.train_steps] == ["actor_train", "critic_train"]


def test_optional_keys() -> None:
    call = MFC("advantages", "actor", "inference", free, ("rewards", "truncated?"), ("advantages", "returns?"))
    assert call.inputs_among({"rewards", "truncated", "versions"}) == ("rewards", "truncated")
    assert call.inputs_among({"rewards"}) == ("rewards",)
    assert call.outputs_among({"advantages"}) == ("advantages",)
    with pytest.raises(ValueError, match="call advantages must read rewards: got only logprobs, truncated"):
        call.inputs_among({"truncated", "logprobs"})


CALLS: list[tuple[Callable[[], object], str, str]] = [
    (lambda: change("ref_inf", name="ref inf"), "the name of a call", "'ref inf'"),
    (lambda: change("ref_inf", role="ref-1"), "the role of a call", "'ref-1'"),
    (lambda: change("ref_inf", interface="trainstep"), "the interface of call ref_inf", "trainstep"),
    (lambda: change("actor_gen", role="actor"), "the role of a call", "actor of call actor_gen, which is generate"),
    (lambda: change("actor_train", role="data"), "the role of a call", "data of call actor_train, which is train_step"),
    (lambda: change("actor_gen", inputs=("prompts",), kwargs={"greedy": True}), "call actor_gen", "inputs and kwargs"),
    (lambda: change("ref_inf", run=None), "run of call ref_inf", "None"),
    (lambda: change("ref_inf", inputs=()), "call ref_inf", "no inputs"),
    (lambda: change("ref_inf", outputs="ref_logprobs"), "outputs of call ref_inf", "the text 'ref_logprobs'"),
    (lambda: change("ref_inf", inputs=("input ids",)), "inputs of call ref_inf", "'input ids'"),
    (lambda: change("ref_inf", inputs=("input_ids", "values", "values?")), "inputs of call ref_inf", "values twice"),
]
GRAPHS: list[tuple[Callable[[], object], str, str]] = [
    (
        lambda: DataFlowGraph([*PPO.values(), change("ref_inf", outputs=("more",))], ENGINES, "actor"),
        "each call",
        "2 calls ref_inf",
    ),
    (lambda: graph(without="actor_gen"), "a graph", "none"),
    (lambda: graph(MFC("rows", "data", "generate", outputs=("more",))), "a graph", "actor_gen and rows"),
    (lambda: changed("critic_train", after=("actor_trian",)), "after of call critic_train", "actor_trian"),
    (
        lambda: graph(MFC("more", "critics", "inference", free, TOKENS)),
        "role critics of call more",
        "engines of actor, critic and ref",
    ),
    (
        lambda: changed("critic_train", run=Actor.ppo_update),
        "run of call critic_train",
        "Actor.ppo_update, and engine Critic",
    ),
    (
        lambda: changed("actor_train", kwargs={"kl_ctl": 0.1}),
        "run of call actor_train",
        "Actor.ppo_update, got an unexpected keyword argument 'kl_ctl'",
    ),
    (lambda: changed("ref_inf", outputs=("ref_logprobs", "rewards")), "a key", "rewards of actor_gen and ref_inf"),
    (lambda: changed("ref_inf", inputs=("input_ids", "attention_masks")), "an input", "attention_masks of ref_inf"),
    (
        lambda: changed("ref_inf", inputs=("input_ids", "truncated")),
        "an input that may be absent",
        "truncated of ref_inf, and truncated? of actor_gen",
    ),
    (
        lambda: changed("ref_inf", after=("critic_train",)),
        "calls",
        "advantages -> critic_train -> ref_inf -> advantages",
    ),
    (lambda: changed("actor_train", name="more_train"), "train steps of a role", "actor_train and more_train of actor"),
    (lambda: graph(MFC("diversity", "actor", "inference", free, TOKENS)), "call diversity", "no order"),
    (lambda: graph(publishes="ref"), "publishes", "ref"),
]


@pytest.mark.parametrize(("make", "subject", "got"), [*CALLS, *GRAPHS])
def test_mistakes_in_a_declaration(make: Callable[[], object], subject: str, got: str) -> None:
    refused(make, subject, got)


def test_what_is_no_mistake() -> None:
    class Own(Actor):
        def compute_advantages(self, batch: Any) -> None: ...

    later = MFC("diversity", "actor", "inference", lambda engine, batch, k=1: {}, TOKENS, after=("actor_train",))
    more = change("actor_train", name="more_train", after=("diversity",))
    graph(later, more, engines=ENGINES | {"actor": Own})
    graph(change("advantages", run=Own.compute_advantages), engines=ENGINES | {"actor": Own})


EXAMPLE = Path(__file__).parents[2] / "examples/arealite/configs/gsm8k_ppo.yaml"
GIVEN = [
    "allocation_mode=sglang.d2+d4",
    "actor.kl_ctl=0.1",
    "ref={}",
    "workers.critic.ranks=2",
    "workers.ref.share=critic",
]


def config(*overrides: str) -> PPOConfig:
    """Return that of the example for PPO, with 2 servers and 4 ranks of the actor on a node of 8 GPUs."""
    return load_expr_config(["--config", str(EXAMPLE), *GIVEN, *overrides], PPOConfig)[0]


def without(*path: str) -> PPOConfig:
    """Return the config without a block, as another class of experiment may have it."""
    changed = config()
    setattr(functools.reduce(getattr, path[:-1], changed), path[-1], None)
    return changed


CONFIGS: list[tuple[Callable[[], PPOConfig], str, str]] = [
    (lambda: without("ref"), "the config", "none"),
    (lambda: without("critic", "optimizer"), "critic.optimizer", "null"),
    (
        lambda: config("workers.critic.ranks=3"),
        "workers",
        "4 of actor and 3 of critic beside 2 GPUs of servers, and 1 x 8 GPUs",
    ),
]


@pytest.mark.parametrize(("make", "subject", "got"), CONFIGS)
def test_configs_that_cannot_run_a_graph(make: Callable[[], PPOConfig], subject: str, got: str) -> None:
    made = make()
    refused(lambda: ppo().check(made), subject, got)


def test_configs_that_can() -> None:
    ppo().check(config())
    ppo().check(config("workers={}"))
    ppo().check(config("workers.critic.ranks=4", "rollout.server_addrs=[10.0.0.1:30000]"))
    ppo().check(config("workers.critic.ranks=400", "cluster.n_gpus_per_node=0"))
    ppo().check(config('allocation_mode=""', "rollout.num_servers=1", "cluster.n_gpus_per_node=3"))


@st.composite
def declared(draw: st.DrawFn) -> list[MFC]:
    """Return calls in a random order, each of which reads keys of earlier ones of another random order."""
    size = draw(st.integers(2, 8))
    calls = [MFC("c0", "data", "generate", outputs=("k0",))]
    for number in range(1, size):
        before = draw(st.sets(st.integers(0, number - 1), min_size=1))
        after = draw(st.sets(st.integers(0, number - 1)))
        inputs, ends = tuple(f"k{one}" for one in sorted(before)), tuple(f"c{one}" for one in sorted(after))
        calls.append(MFC(f"c{number}", f"r{number}", "inference", free, inputs, (f"k{number}",), after=ends))
    read = {key for call in calls for key in call.inputs}
    last = MFC("last", "last", "train_step", free, tuple(f"k{one}" for one in range(size) if f"k{one}" not in read))
    return draw(st.permutations([*calls, last]))


def build(calls: list[MFC]) -> DataFlowGraph:
    return DataFlowGraph(calls, {call.role: object for call in calls if not call.is_source}, "last")


@given(declared())
def test_order_is_topological(calls: list[MFC]) -> None:
    graph = build(calls)
    order = [call.name for call in graph.order()]
    assert sorted(order) == sorted(call.name for call in calls)
    assert all({*graph.needs[name]} <= {*order[:number]} for number, name in enumerate(order))


@given(declared())
def test_direct_needs_imply_all(calls: list[MFC]) -> None:
    graph = build(calls)
    reached: dict[str, set[str]] = {}
    for call in graph.order():
        direct = {*graph.direct_needs(call.name)}
        reached[call.name] = direct.union(*(reached[before] for before in direct))
        for before in direct:
            assert not any(before in reached[other] for other in direct), "no longer path implies it"
        assert {*graph.needs[call.name]} <= reached[call.name] == graph.ancestors[call.name]
