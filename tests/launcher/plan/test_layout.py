"""Which roles share workers, how many each group has, and wishes that no cluster can fulfil."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.api.alloc_mode import ParallelSizes
from arealite.api.cli_args import (
    BaseExperimentConfig,
    PPOConfig,
    RoleConfig,
    SFTConfig,
    WorkersConfig,
    load_expr_config,
)
from arealite.api.config.run import load_run_config
from arealite.api.errors import ConfigError
from arealite.launcher.place.local import LocalPlace, LocalSlot
from arealite.launcher.plan.jobs import plan_lines, trainer_job
from arealite.launcher.plan.layout import make_layout
from arealite.launcher.plan.plan import Run, checked_plan, make_plan
from arealite.launcher.ray import main as ray_main
from arealite.launcher.slurm import main as slurm_main
from arealite.launcher.torchrun import main as torchrun_main

EXAMPLES = Path(__file__).parents[3] / "examples" / "arealite"
PPO = EXAMPLES / "configs" / "gsm8k_ppo.yaml"
SERVERS_AND_RANKS = "allocation_mode=sglang.d2+d4"  # on a node of 8 GPUs


@pytest.fixture(autouse=True)
def no_servers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AREAL_LLM_SERVER_ADDRS", raising=False)


def ppo(*overrides: str) -> PPOConfig:
    given = [SERVERS_AND_RANKS, "workers={}", "actor.kl_ctl=0.1", "ref={}", *overrides]
    return load_expr_config(["--config", str(PPO), *given], PPOConfig)[0]


def groups(config: BaseExperimentConfig, **options: Any) -> list[tuple[tuple[str, ...], int]]:
    layout = make_layout(config, **options)
    assert [group.name for group in layout] == [group.name for group in layout if group.name in group.roles]
    return [(group.roles, group.num_ranks) for group in layout]


def test_roles_that_say_nothing_lie_with_the_trained_one() -> None:
    assert groups(ppo()) == [(("actor", "critic", "ref"), 4)]
    assert groups(ppo("allocation_mode=''", "rollout.num_servers=1")) == [(("actor", "critic", "ref"), 1)]


def test_ranks_give_a_role_workers_of_its_own_which_others_may_share() -> None:
    own = "workers.critic.ranks=2"
    assert groups(ppo(own)) == [(("actor", "ref"), 4), (("critic",), 2)]
    assert groups(ppo(own, "workers.ref.share=critic")) == [(("actor",), 4), (("critic", "ref"), 2)]
    assert groups(ppo("workers.ref.share=critic")) == [(("actor", "critic", "ref"), 4)]
    assert groups(ppo("workers.actor.ranks=3", "workers.ref.ranks=1")) == [(("actor", "critic"), 3), (("ref",), 1)]


def test_sizes_give_a_role_workers_of_its_own_whose_models_they_divide() -> None:
    actor, critic = make_layout(ppo("workers.actor.parallel=d1t2", "workers.critic.parallel=d2c2"))
    assert (actor.roles, actor.sizes, actor.num_ranks) == (("actor", "ref"), ParallelSizes(tensor=2), 2)
    assert (critic.roles, critic.sizes, critic.num_ranks) == (("critic",), ParallelSizes(data=2, context=2), 4)
    (both,) = make_layout(ppo("workers.actor={parallel: d2e2, ranks: 2}"))
    assert both.sizes == ParallelSizes(data=2, expert=2)


def test_the_first_group_has_the_sizes_of_the_trainer_and_ranks_are_of_data_alone() -> None:
    actor, ref = make_layout(ppo("allocation_mode=sglang.d2+d2t2", "workers.ref.ranks=2"))
    assert (actor.sizes, ref.sizes) == (ParallelSizes(data=2, tensor=2), ParallelSizes(data=2))
    (alone,) = make_layout(ppo("allocation_mode=sglang.d2+d2t2", "workers.actor.ranks=4"))
    assert alone.sizes == ParallelSizes(data=4)


def test_a_trained_role_may_share_too() -> None:
    assert groups(ppo("workers.actor.share=critic")) == [(("actor", "critic", "ref"), 4)]
    assert make_layout(ppo("workers.actor.share=critic"))[0].name == "critic"
    both = ppo("workers.actor.share=ref", "workers.critic.share=ref", "workers.ref.ranks=2")
    assert groups(both) == [(("actor", "critic", "ref"), 2)]


def test_a_graph_counts_only_its_roles_in_any_order() -> None:
    assert groups(ppo("workers.ref.ranks=1"), roles=["critic", "actor"]) == [(("actor", "critic"), 4)]


def test_an_experiment_without_a_policy_has_a_model() -> None:
    given = ["allocation_mode=d2", "workers.model={threads: 3, strategy: SPREAD}", "cluster.n_gpus_per_node=0"]
    config, _ = load_expr_config(["--config", str(EXAMPLES / "configs" / "gsm8k_sft.yaml"), *given], SFTConfig)
    (group,) = make_layout(config)
    assert (group.roles, group.num_ranks, group.threads, group.strategy, group.num_gpus) == (
        *(("model",), 2, 3, "SPREAD", 0),
    )


MISTAKES: list[tuple[list[str], str, str]] = [
    (["workers.ref.share=critics"], "workers.ref.share", "critics"),
    (["workers.ref.share=teacher"], "workers.ref.share", "teacher"),
    (["workers.ref.share=ref"], "workers.ref.share", "ref, which shares those of ref"),
    (
        ["workers.ref.share=critic", "workers.critic.share=actor"],
        "workers.ref.share",
        "critic, which shares those of actor",
    ),
    (["workers.ref={share: actor, ranks: 2}"], "workers.ref", "2"),
    (["workers.ref={threads: 2, strategy: SPREAD}"], "workers.ref", "2 and SPREAD"),
    (["workers.ref={share: actor, parallel: d1t2}"], "workers.ref", "d1t2"),
    (["workers.actor={parallel: d2t2, ranks: 2}"], "workers.actor.ranks", "2"),
    (["workers.actor.parallel=x2"], "workers.actor.parallel", "x2"),
    (["workers.actor.parallel=d2e4"], "workers.actor.parallel", "d2e4"),
    (["actor.parallel=d1t2"], "actor.parallel", "d1t2"),
    (["workers.actor.parallel=d2t2", "actor.lora.rank=4"], "t of the trainer", "d2p1t2"),
    (["workers.teacher.ranks=2"], "workers", "teacher"),
    (["workers.critic.ranks=3"], "workers", "4 of actor and 3 of critic beside 2 GPUs of servers, and 1 x 8 GPUs"),
    (
        ["workers.actor={ranks: 9, strategy: STRICT_PACK}", "cluster.n_nodes=2"],
        "workers.actor",
        "9 ranks, and 8 GPUs per node",
    ),
    (
        ["workers.actor={ranks: 3, strategy: STRICT_SPREAD}", "cluster.n_nodes=2"],
        "workers.actor",
        "3 ranks and 2 nodes",
    ),
]


@pytest.mark.parametrize(("wishes", "subject", "got"), MISTAKES)
def test_mistakes(wishes: list[str], subject: str, got: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_layout(ppo(*wishes))
    assert str(caught.value).startswith(f"{subject} must ") and f": got {got}. " in str(caught.value)


def test_a_config_class_of_the_script_may_have_roles_that_the_launcher_does_not_know() -> None:
    config = load_run_config(["--config", str(PPO), SERVERS_AND_RANKS, "workers.critic.ranks=2"])
    assert groups(config) == [(("actor",), 4), (("critic",), 2)]


LARGE = ppo("cluster.n_nodes=9")


@given(
    ranks=st.fixed_dictionaries({role: st.none() | st.integers(1, 4) for role in ("actor", "critic", "ref")}),
    hosts=st.fixed_dictionaries({role: st.none() | st.sampled_from(("actor", "critic")) for role in ("critic", "ref")}),
)
def test_each_role_has_one_group_that_has_the_ranks_of_its_owner(
    ranks: dict[str, int | None], hosts: dict[str, str | None]
) -> None:
    wishes = {role: RoleConfig(ranks=ranks[role], share=hosts.get(role)) for role in ranks}
    config = LARGE.new(workers=WorkersConfig(**wishes))
    try:
        layout = make_layout(config)
    except ConfigError:
        has_both = any(ranks[role] and hosts[role] for role in hosts)
        assert has_both or hosts["critic"] == "critic" or (hosts["ref"] == "critic" and hosts["critic"])
        return
    assert sorted(role for group in layout for role in group.roles) == ["actor", "critic", "ref"]
    assert all(group.num_ranks == (ranks[group.name] or 4) for group in layout)
    assert all(host is None or any({role, host} <= {*group.roles} for group in layout) for role, host in hosts.items())


# The plan of a run with a master


def test_a_master_is_one_rank_without_devices_beside_the_servers() -> None:
    plan = make_plan(ppo("workers.critic.ranks=2"))
    assert [(one.name, one.node, one.devices) for one in plan.placements] == [
        *(("server-0", 0, (0,)), ("server-1", 0, (1,)), ("trainer-0", 0, ())),
    ]
    assert (plan.num_workers, [group.num_gpus for group in plan.groups]) == (6, [4, 2])
    full = make_plan(ppo("allocation_mode=sglang.d8+d8", "cluster.n_nodes=2"))
    assert full.trainers[0].node == 0, "it needs no GPU of a node"


def test_what_does_not_train_has_no_master() -> None:
    only_servers = make_plan(ppo("allocation_mode=sglang.d2"))
    assert (only_servers.trainers, only_servers.groups) == ((), ())


async def slots_of(config: BaseExperimentConfig) -> list[list[str]]:
    place, plan = LocalPlace(), make_plan(config)
    place.open(config, plan, print)
    slots = await place.take(plan.placements)
    for slot in slots:
        await slot.close()
    assert all(isinstance(slot, LocalSlot) for slot in slots)
    return [list(slot.gpus) for slot in slots]


def test_a_local_master_gets_the_gpus_of_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(10, 18))))
    assert asyncio.run(slots_of(ppo("workers.actor.ranks=2", "workers.ref.ranks=1"))) == [
        *(["10"], ["11"], ["12", "13", "14"])
    ]
    assert asyncio.run(slots_of(ppo("workers=null")))[2:] == [["12"], ["13"], ["14"], ["15"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    config = ppo("allocation_mode=lite.d2+d4", "workers.ref.ranks=1")
    with pytest.raises(ConfigError, match="needs 7, and 6 GPUs on this node"):
        LocalPlace().check(config, make_plan(config))


def test_workers_share_the_cores_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(26)))
    config = ppo("allocation_mode=lite.d2+d4", "workers.critic.ranks=2", "cluster.n_gpus_per_node=0")
    run = Run(config, make_plan(config), Path("e.py"), [])
    (master,) = [trainer_job(run, one, [], master=("h", 1), is_restart=False) for one in run.plan.trainers]
    assert (master.env["OMP_NUM_THREADS"], master.env["WORLD_SIZE"]) == ("4", "1")  # (26 - 2) / 6


def test_a_dry_run_shows_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(60)))
    config = ppo("workers.critic={parallel: t2, threads: 1, strategy: STRICT_PACK}", "workers.ref.share=critic")
    lines = list(plan_lines(Run(config, make_plan(config), Path("e.py"), []), by="local"))
    begin = lines.index("node 0")
    assert lines[begin : lines.index("server-0 runs")] == [
        "node 0",
        "  server-0       GPU 0     log server-0.log",
        "  server-1       GPU 1     log server-1.log",
        "  trainer-0      log trainer-0.log",
        "workers of trainer-0, on nodes that Ray chooses",
        "  actor-{0-3}    4 GPUs, 9 threads each, PACK, for actor  log actor-{0-3}.log",
        "  critic-{0-1}   d1p1t2, 2 GPUs, 1 thread each, STRICT_PACK, for critic, ref  log critic-{0-1}.log",
    ]
    assert any("OMP_NUM_THREADS=9 RANK=0 WORLD_SIZE=1" in line for line in lines)


@pytest.mark.parametrize("launcher, start", [("slurm", slurm_main), ("torchrun", torchrun_main), ("ray", ray_main)])
def test_launchers_without_ray_refuse(
    launcher: str, start: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(EXAMPLES / "gsm8k_ppo.py"), "--config", str(PPO), SERVERS_AND_RANKS, "workers={}", "--dry-run"]
    status, message = start([*words, "trial_name=t"]), capsys.readouterr()
    if launcher == "ray":
        assert (status, message.err) == (0, "")
        return
    assert status == 2 and message.err.startswith(
        "ConfigError: workers must be started by the local or the Ray launcher: got"
    )


def test_a_launcher_refuses_what_a_graph_refuses() -> None:
    with pytest.raises(ConfigError, match="workers must fit the cluster: got 4 of actor and 3 of critic"):
        checked_plan(ppo("workers.critic.ranks=3"))
