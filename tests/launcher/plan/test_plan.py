"""Where the processes of a run are placed, worked out by hand and held to invariants."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.api.config.run import load_run_config
from arealite.api.errors import ConfigError
from arealite.launcher.local import main as local_main
from arealite.launcher.plan.layout import foreign_servers
from arealite.launcher.plan.plan import Plan, make_plan
from arealite.launcher.ray import main as ray_main

REPOSITORY = Path(__file__).parents[3]
GRPO = REPOSITORY / "examples" / "arealite" / "configs" / "gsm8k_grpo.yaml"
SFT = REPOSITORY / "examples" / "arealite" / "configs" / "gsm8k_sft.yaml"

CONFIG = load_run_config(["--config", str(GRPO), "cluster.n_gpus_per_node=0"])


@pytest.fixture(autouse=True)
def no_servers_of_others(monkeypatch):
    monkeypatch.delenv("AREAL_LLM_SERVER_ADDRS", raising=False)


def plan_of(mode: str, nodes: int, gpus: int, *overrides: str) -> Plan:
    cluster = [f"allocation_mode={mode}", f"cluster.n_nodes={nodes}", f"cluster.n_gpus_per_node={gpus}"]
    return make_plan(load_run_config(["--config", str(GRPO), *cluster, *overrides]))


def where(plan: Plan) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(one.name, one.node, one.devices) for one in plan.placements]


def test_servers_stay_whole_and_trainers_follow():
    assert where(plan_of("sglang.d3t3+d4", 3, 8)) == [
        ("server-0", 0, (0, 1, 2)),
        ("server-1", 0, (3, 4, 5)),
        ("server-2", 1, (0, 1, 2)),  # two GPUs of node 0 stay idle
        *((f"trainer-{rank}", 1, (3 + rank,)) for rank in range(4)),
    ]


def test_ranks_fill_the_nodes_in_order():
    assert where(plan_of("vllm.d1t2+d6", 2, 4)) == [
        ("server-0", 0, (0, 1)),
        *((f"trainer-{rank}", 0, (2 + rank,)) for rank in range(2)),
        *((f"trainer-{rank}", 1, (rank - 2,)) for rank in range(2, 6)),
    ]


def test_a_cpu_cluster_shares_processes_out():
    assert where(plan_of("lite.d3p1t1+d1p1t1", 4, 0)) == [
        ("server-0", 0, ()),
        ("server-1", 1, ()),
        ("server-2", 2, ()),
        ("trainer-0", 3, ()),
    ]


def test_an_evaluation_client_needs_no_gpu():
    assert where(plan_of("sglang.d2+eval", 1, 2)) == [
        ("server-0", 0, (0,)),
        ("server-1", 0, (1,)),
        ("trainer-0", 0, ()),
    ]


def test_fine_tuning_has_no_servers():
    overrides = ["allocation_mode=d4", "cluster.n_nodes=2", "cluster.n_gpus_per_node=2"]
    plan = make_plan(load_run_config(["--config", str(SFT), *overrides]))
    assert where(plan) == [(f"trainer-{rank}", rank // 2, (rank % 2,)) for rank in range(4)]
    assert (plan.trainer_nodes, [one.name for one in plan.ranks_on(1)]) == ((0, 1), ["trainer-2", "trainer-3"])


def test_servers_of_others_take_no_place():
    plan = plan_of("sglang.d8+d2", 1, 2, "rollout.server_addrs=[a:1]")
    assert where(plan) == [("trainer-0", 0, (0,)), ("trainer-1", 0, (1,))]


@pytest.mark.parametrize(
    ("text", "addresses"), [("http://a:1/, b:2", ["a:1", "b:2"]), (" ", []), ("", [])], ids=["two", "blank", "none"]
)
def test_servers_of_others_are_named_to_launchers_as_to_trainers(monkeypatch, text, addresses):
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", text)
    assert foreign_servers(CONFIG) == addresses
    assert foreign_servers(load_run_config(["--config", str(SFT)])) == []


def test_servers_of_others_must_have_addresses(monkeypatch):
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "http://a")
    with pytest.raises(ConfigError, match="AREAL_LLM_SERVER_ADDRS must name servers: an address must be host:port"):
        plan_of("sglang.d1+d1", 1, 2)


def test_servers_of_others_do_not_go_with_a_server_in_the_trainers_process(monkeypatch):
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "a:1")
    with pytest.raises(ConfigError, match=r"AREAL_LLM_SERVER_ADDRS must be empty with allocation_mode=lite.*: got a:1"):
        plan_of("lite.d1|d1", 1, 0)


@pytest.mark.parametrize(
    "mode, nodes, gpus, message",
    [
        ("sglang.d1t16+d8", 4, 8, "a server must fit into one node: got d1p1t16"),
        ("sglang.d3t3+d3", 2, 6, None),
        ("sglang.d4t3+d2", 4, 4, "needs 5 nodes with 4 GPUs as no server is spread over two"),
        ("d4", 1, 4, "must name servers for reinforcement learning"),
    ],
)
def test_refusals(mode, nodes, gpus, message):
    if message is None:
        plan_of(mode, nodes, gpus)
        return
    with pytest.raises(ConfigError, match=message):
        plan_of(mode, nodes, gpus, "rollout.weight_update=disk")


@given(
    servers=st.integers(1, 12),
    size=st.integers(1, 8),
    ranks=st.integers(1, 20),
    nodes=st.integers(1, 40),
    gpus=st.integers(1, 8),
)
def test_no_device_is_given_twice(servers, size, ranks, nodes, gpus):
    try:
        cluster = CONFIG.cluster.new(n_nodes=nodes, n_gpus_per_node=gpus)
        plan = make_plan(CONFIG.new(allocation_mode=f"sglang.d{servers}t{size}+d{ranks}", cluster=cluster))
    except ConfigError:
        full = servers * size + ranks > nodes * gpus
        assert full or size > gpus or gpus % size != 0, "only fragments may keep a plan from fitting"
        return
    taken = [(one.node, device) for one in plan.placements for device in one.devices]
    assert len(taken) == len(set(taken)) == servers * size + ranks
    assert all(node < nodes and device < gpus for node, device in taken)
    assert all(len(one.devices) == size for one in plan.servers)
    assert [one.index for one in plan.trainers] == list(range(ranks))
    assert [one for node in plan.trainer_nodes for one in plan.ranks_on(node)] == list(plan.trainers)


def test_dry_run_of_this_node(capsys, tmp_path):
    entry = tmp_path / "entry.py"
    entry.write_text("")
    argv = [str(entry), "--config", str(GRPO), "--dry-run", "allocation_mode=lite.d2+d2", "cluster.n_gpus_per_node=0"]
    assert local_main([*argv, f"cluster.fileroot={tmp_path}"]) == 0
    message = capsys.readouterr().out
    assert "node 0\n  server-0       log server-0.log\n" in message
    assert "  trainer-{0-1}  log trainer-{0-1}.log\n" in message
    assert list(tmp_path.iterdir()) == [entry], "nothing may be written"


def test_files_of_the_user_do_not_stand_in_for_the_standard_library(tmp_path):
    for name in ("entry", "json", "logging"):
        (tmp_path / f"{name}.py").write_text("")
    program = [sys.executable, "-m", "arealite.launcher.local", "entry.py", "--config", str(GRPO), "--dry-run"]
    done = subprocess.run(
        [*program, "cluster.n_gpus_per_node=0", "allocation_mode=lite.d1+d1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_dry_run_of_the_documented_ray_command(monkeypatch, capsys):
    """12 + 4 GPUs on 4 x 4; the file is the whole answer."""
    monkeypatch.chdir(REPOSITORY)
    argv = ["examples/arealite/gsm8k_grpo.py", "--config", "examples/arealite/configs/gsm8k_grpo.yaml"]
    argv += ["experiment_name=my_experiment", "trial_name=my_trial", "allocation_mode=sglang.d12p1t1+d4p1t1"]
    argv += ["cluster.n_nodes=4", "cluster.n_gpus_per_node=4", "cluster.fileroot=/runs"]
    assert ray_main([*argv, "--dry-run"]) == 0
    message = capsys.readouterr().out.replace(f"{REPOSITORY}/", "")
    assert message == (Path(__file__).parent / "golden" / "ray_4x4.txt").read_text()
