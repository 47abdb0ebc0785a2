"""Which processes a config asks for, with which flags and devices, and what is refused before anything starts."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

import arealite
from arealite.api.alloc_mode import AllocationMode, ParallelSizes
from arealite.api.config.run import RunConfig, load_run_config
from arealite.api.errors import ConfigError
from arealite.launcher.place.base import Job
from arealite.launcher.place.local import LocalPlace
from arealite.launcher.plan.jobs import mesh_lines, plan_lines, server_job, trainer_job, trainer_threads
from arealite.launcher.plan.plan import Plan, Run, checked_plan, make_plan
from arealite.utils.devices import visible_gpus

COMMON = """
experiment_name: e
trial_name: t
train_dataset: {path: gsm8k, batch_size: 4}
cluster: {n_gpus_per_node: 0}
"""


@pytest.fixture(autouse=True)
def no_servers_or_gpus(monkeypatch):
    monkeypatch.delenv("AREAL_LLM_SERVER_ADDRS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def load(tmp_path):
    """Return a function that reads a config as the launcher does."""

    def read(*overrides: str) -> RunConfig:
        is_rl = any(override.startswith("actor") for override in overrides)
        (tmp_path / "config.yaml").write_text(COMMON + ("gconfig: {max_new_tokens: 64}\n" if is_rl else ""))
        return load_run_config(["--config", str(tmp_path / "config.yaml"), *overrides])

    return read


@pytest.fixture
def server_python(tmp_path):
    """An interpreter other than ours, in whose environment the packages sglang and vllm are."""
    site_packages = tmp_path / "environment" / "packages"
    for name in ("sglang", "vllm"):
        (site_packages / name).mkdir(parents=True)
        (site_packages / name / "__init__.py").touch()
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir()
    base = sys._base_executable
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site_packages}:$PYTHONPATH exec {base} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put an nvidia-smi for 8 GPUs on the path."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nfor i in 0 1 2 3 4 5 6 7; do echo "GPU $i: NVIDIA H200 (UUID: GPU-$i)"; done\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")


def plan_of(config: RunConfig) -> Plan:
    """Check as the local launcher does."""
    plan = checked_plan(config)
    LocalPlace().check(config, plan)
    return plan


def server_jobs(config: RunConfig) -> list[Job]:
    return [server_job(config, one, "127.0.0.1", []) for one in plan_of(config).servers]


def program(job: Job) -> list[str]:
    """Return the command of the real server, without that of the program that serves it."""
    return job.command[job.command.index("--") + 1 :]


def flags_of(command: list[str]) -> dict[str, str]:
    pairs = zip(command, [*command[1:], "--"])
    return {flag: "" if value.startswith("--") else value for flag, value in pairs if flag.startswith("--")}


def test_lite_servers(load):
    config = load(
        "allocation_mode=lite.d2+d2", "actor.path=tiny", "lite.deterministic=true", "lite.threads=2", "seed=5"
    )
    jobs = server_jobs(config)
    assert program(jobs[1])[:3] == [sys.executable, "-m", "arealite.server"]
    assert flags_of(program(jobs[1])) == {
        "--model-path": "tiny",
        "--threads": "2",
        "--slots": "64",
        "--context": "2048",
        "--device": "cpu",
        "--dtype": "float32",
        "--deterministic": "",
        "--weight-version": "0",
        "--seed": "6",
    }
    serve = jobs[1].command[: jobs[1].command.index("--")]
    assert serve[:3] == [sys.executable, "-m", "arealite.launcher.serve"]
    assert flags_of(serve) == {"--backend": "lite", "--name": "server-1", "--host": "127.0.0.1"}
    assert jobs[0].env["OMP_NUM_THREADS"] == "2"


def test_sglang_servers_and_devices(load, server_python, nvidia_smi):
    config = load(
        *("allocation_mode=sglang.d2t2+d3", "actor.path=tiny", "cluster.n_gpus_per_node=8"),
        *(f"launcher.server_python={server_python}", "sglang.model_path=tiny"),
        "sglang={random_seed: 10, enable_metrics: true, log_requests: false, torchao_config: null}",
        "sglang.cuda_graph_bs=[1, 2]",
    )
    jobs = server_jobs(config)
    flags = flags_of(program(jobs[1]))
    assert program(jobs[1])[:3] == [server_python, "-m", "arealite.launcher.serve.sglang_server"]
    assert (
        flags["--model-path"] == "tiny"
        and flags["--tp-size"] == "2"
        and flags["--random-seed"] == "11"
        and flags["--enable-metrics"] == ""
    )
    assert "--log-requests" not in flags and "--torchao-config" not in flags
    assert jobs[1].command[jobs[1].command.index("--cuda-graph-bs") + 1 :][:2] == ["1", "2"]
    assert [one.devices for one in plan_of(config).servers] == [(0, 1), (2, 3)]


@pytest.mark.parametrize("flag", ["model-path", "model_path"])
def test_the_model_may_be_repeated_among_flags_of_servers(load, server_python, nvidia_smi, flag):
    config = load(
        *("allocation_mode=sglang.d1+d1", "actor.path=tiny", "cluster.n_gpus_per_node=8"),
        *(f"launcher.server_python={server_python}", f"sglang={{{flag}: tiny}}"),
    )
    assert program(*server_jobs(config)).count("--model-path") == 1


@pytest.mark.parametrize(("flag", "seed"), [("random-seed: 10", 11), ("random_seed: null", 2)])
def test_the_seed_of_servers_is_the_users(load, server_python, nvidia_smi, flag, seed):
    config = load(
        *("allocation_mode=sglang.d2+d1", "actor.path=tiny", "cluster.n_gpus_per_node=8", "seed=1"),
        *(f"launcher.server_python={server_python}", f"sglang={{{flag}}}"),
    )
    command = program(server_jobs(config)[1])
    assert [value for name, value in itertools.pairwise(command) if name == "--random-seed"] == [str(seed)]


def test_ranks_know_each_other_as_under_torchrun(load):
    config = load("allocation_mode=d5", "model.path=tiny", "cluster.n_nodes=2", "launcher.trainer_env_vars=RANK_ZERO=b")
    run = Run(config, make_plan(config), Path("e.py"), ["a=b"])
    jobs = [trainer_job(run, one, ["7", "6"], master=("h", 9), is_restart=True) for one in run.plan.trainers]
    names = ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
    assert [[job.env[name] for name in names] for job in jobs] == [
        *(["0", "0", "3", "0"], ["1", "1", "3", "0"], ["2", "2", "3", "0"], ["3", "0", "2", "1"], ["4", "1", "2", "1"])
    ]
    for job in jobs:
        assert job.command == [sys.executable, "e.py", "a=b"]
        assert [job.env[name] for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")] == [
            *("5", "2", "h", "9")
        ]
        assert (job.env["AREAL_RECOVER_RUN"], job.env["RANK_ZERO"], job.env["CUDA_VISIBLE_DEVICES"]) == (
            "1",
            "b",
            "7,6",
        )


def test_vllm_servers(load, server_python, nvidia_smi):
    config = load(
        *("allocation_mode=vllm.d2t2+d3", "actor.path=tiny", "cluster.n_gpus_per_node=8", "seed=5"),
        *(f"launcher.server_python={server_python}", "rollout.pause_mode=in_place"),
        "vllm={max_model_len: 512, enforce_eager: true, enable_chunked_prefill: false, compilation_config: {mode: 3}}",
    )
    jobs = server_jobs(config)
    assert program(jobs[1])[:3] == [server_python, "-m", "arealite.launcher.serve.vllm_server"]
    assert flags_of(program(jobs[1])) == {
        "--model": "tiny",
        "--dtype": "bfloat16",
        "--tensor-parallel-size": "2",
        "--seed": "6",
        "--max-model-len": "512",
        "--enforce-eager": "",
        "--compilation-config": '{"mode": 3}',
        "--no-enable-prefix-caching": "",
        "--no-enable-chunked-prefill": "",
    }


def test_only_sequences_that_keep_their_cache_turn_its_sharing_off(load, server_python):
    common = ("allocation_mode=vllm.d1+d1", "actor.path=tiny", f"launcher.server_python={server_python}")
    for mode, expected in {"abort": False, "retract": False, "in_place": True}.items():
        config = load(*common, f"rollout.pause_mode={mode}")
        command = server_jobs(config)[0].command
        assert ("--no-enable-prefix-caching" in command) == expected, mode


@pytest.mark.parametrize(("backend", "flag"), [("vllm", True), ("lite", False)])
def test_servers_return_what_they_sample_from_where_training_needs_it(load, server_python, backend, flag):
    common = (f"allocation_mode={backend}.d1+d1", "actor.path=tiny", f"launcher.server_python={server_python}")
    for sampling, expected in (("gconfig.top_k=20", flag), ("gconfig.temperature=0.5", False)):
        command = server_jobs(load(*common, sampling))[0].command
        assert ("--return-sampling-mask" in command) == expected, sampling


@pytest.mark.parametrize("is_installed", [False, True])
def test_an_interpreter_of_servers_finds_this_package_only(load, server_python, tmp_path, monkeypatch, is_installed):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    root = str(Path(arealite.__file__).parents[1])
    if is_installed:
        monkeypatch.setattr("site.getsitepackages", lambda: [root])
    config = load("allocation_mode=vllm.d1+d1", "actor.path=tiny", f"launcher.server_python={server_python}")
    for _ in range(2):
        (job,) = server_jobs(config)
    code = "import arealite, vllm, arealite.launcher.serve.vllm_server; print(arealite.__file__, vllm.__file__)"
    said = subprocess.run(
        [program(job)[0], "-c", code], env=os.environ | job.env, capture_output=True, text=True, check=True
    ).stdout
    ours, theirs = said.split()
    assert Path(ours).resolve() == Path(arealite.__file__).resolve() and theirs.startswith(str(tmp_path))
    folder = Path(job.env["PYTHONPATH"])
    assert (list(folder.iterdir()) == [folder / "arealite"]) if is_installed else (str(folder) == root)
    assert job.env["PATH"].split(":")[0] == str(Path(server_python).parent)


def test_chosen_gpus_are_kept(load, nvidia_smi, monkeypatch):
    assert visible_gpus() == [str(index) for index in range(8)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,3")
    config = load("allocation_mode=lite.d1+d1", "actor.path=tiny", "cluster.n_gpus_per_node=8")
    slots = asyncio.run(LocalPlace().take(plan_of(config).placements))
    assert [slot.gpus for slot in slots] == [["6"], ["3"]]


@pytest.mark.parametrize(
    ("words", "server", "trainer"),
    [
        ((), 7, 8),
        (("rollout.max_head_offpolicyness=1",), 1, 7),
        (("lite.threads=3",), 3, 8),
        (("lite.threads=3", "rollout.max_head_offpolicyness=1"), 3, 5),
        (("allocation_mode=lite.d2+d2",), 3, 4),
        (("cluster.n_nodes=2",), 1, 4),
    ],
    ids=str,
)
def test_servers_and_trainers_that_take_turns_share_cores(load, monkeypatch, words, server, trainer):
    """Servers leave one core to the trainer's requests."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    config = load("allocation_mode=lite.d1+d1", "actor.path=tiny", *words)
    plan = checked_plan(config)
    assert config.lite_threads == server
    job = server_job(config, plan.servers[0], "h", [])
    assert job.env["OMP_NUM_THREADS"] == str(server) and f"--threads {server}" in " ".join(job.command)
    assert trainer_threads(config, plan, num_ranks=len(plan.trainers)) == trainer


def test_servers_that_compute_beside_the_trainer_keep_cores(load, monkeypatch):
    """Whatever the bound: one in its process has a core, and SGLang's scheduler never rests."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    for mode in ("lite.d1|d1", "sglang.d1+d1"):
        config = load(f"allocation_mode={mode}", "actor.path=tiny")
        plan = make_plan(config)
        assert trainer_threads(config, plan, num_ranks=1) == 7, mode
    assert load("allocation_mode=lite.d1|d1", "actor.path=tiny").rollout.colocated.threads == 1


def test_a_server_in_the_trainers_process(load, monkeypatch):
    """It is no job; with one device it gets that of the trainer, and on the CPU it has threads of its own."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    words = [
        "allocation_mode=lite.d1|d1",
        "actor.path=tiny",
        "lite.threads=3",
        "lite.slots=9",
        "cluster.n_gpus_per_node=1",
    ]
    config = load(*words)
    assert config.rollout.colocated.path == "tiny" and config.rollout.colocated.slots == 9
    plan = checked_plan(config)
    assert [(one.name, one.devices) for one in plan.placements] == [("trainer-0", (0,))]
    lines = list(plan_lines(Run(config, plan, Path("x.py"), []), by="local"))
    assert "trainer-0 also samples: its process runs the server lite, on its own parameters" in lines
    job = trainer_job(Run(config, plan, Path("x.py"), []), plan.trainers[0], [], master=("h", 1), is_restart=False)
    assert job.env["OMP_NUM_THREADS"] == "5"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    job = trainer_job(Run(config, plan, Path("x.py"), []), plan.trainers[0], [], master=("h", 1), is_restart=False)
    assert job.env["OMP_NUM_THREADS"] == "2", "the user has chosen"
    assert load("allocation_mode=lite.d1+d1", "actor.path=tiny").rollout.colocated is None


def test_servers_that_sleep_on_the_trainers_gpus(load, server_python, nvidia_smi):
    """They can give memory back, and leave some to the trainer that is there when they are awake."""
    words = ["actor.path=tiny", "cluster.n_gpus_per_node=2", f"launcher.server_python={server_python}"]
    config = load("allocation_mode=sglang.d2|d2", *words)
    assert config.rollout.servers_sleep and config.rollout.weight_update == "disk"
    plan = plan_of(config)
    assert [(one.name, one.devices) for one in plan.placements] == [
        *(("server-0", (0,)), ("server-1", (1,))),
        *(("trainer-0", (0,)), ("trainer-1", (1,))),
    ]
    (job, _), lines = server_jobs(config), list(plan_lines(Run(config, plan, Path("x.py"), []), by="local"))
    assert {"--enable-memory-saver": "", "--mem-fraction-static": "0.5"}.items() <= flags_of(program(job)).items()
    assert job.env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert not any("stay idle" in line for line in lines)
    assert plan.takes_turns and not plan_of(load("allocation_mode=sglang.d1+d1", *words)).takes_turns
    assert not plan_of(load("allocation_mode=sglang.d2|d2", *words, "rollout.replay_from=run")).takes_turns
    config = load("allocation_mode=vllm.d1t2|d2", *words, "vllm.gpu_memory_utilization=0.3")
    assert [one.devices for one in plan_of(config).placements] == [(0, 1), (0,), (1,)]
    (job,) = server_jobs(config)
    assert {"--enable-sleep-mode": "", "--gpu-memory-utilization": "0.3"}.items() <= flags_of(program(job)).items()


def test_the_mesh_of_a_trainer_is_spelled():
    assert [*mesh_lines(AllocationMode.from_str("sglang.d16p1m1+d32p2m1").train)] == [
        "trainer d32p2t1: 64 ranks divide",
        "  p2   layers               ranks 0,32  1,33  2,34  3,35  ... (32 groups)",
        "  d32  rows, state          ranks 0-31  32-63",
    ]
    assert [*mesh_lines(ParallelSizes.from_str("d2t2c2e4"))] == [
        "trainer d2p1t2c2e4: 8 ranks divide",
        "  d2   rows, state          ranks 0,4  1,5  2,6  3,7",
        "  c2   tokens, heads        ranks 0,2  1,3  4,6  5,7",
        "  t2   matrices, vocabulary ranks 0-1  2-3  4-5  6-7",
        "  e4   experts              ranks 0-3  4-7",
    ]
    assert [*mesh_lines(ParallelSizes())] == []


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_servers_that_sleep_on_a_cpu_save_no_memory(load, server_python, name):
    """They refuse the flags there, but not the calls."""
    words = "actor.path=tiny", f"launcher.server_python={server_python}"
    (job,) = server_jobs(load(f"allocation_mode={name}.d1|d1", *words))
    assert {"--enable-memory-saver", "--enable-sleep-mode", "--mem-fraction-static"}.isdisjoint(program(job))
    (other,) = server_jobs(load(f"allocation_mode={name}.d1+d1", *words))
    assert "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION" not in other.env
    assert load(f"allocation_mode={name}.d1+d1", *words).rollout.weight_update == "broadcast"


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["actor.path=tiny"], "allocation_mode must be given"),
        (
            ["actor.path=tiny", "allocation_mode=lite.d1+d2t2", "actor.torch_compile=true"],
            "t of the trainer must be 1 with actor.torch_compile: got d2p1t2. Write t1 and d4",
        ),
        (
            ["actor.path=tiny", "allocation_mode=lite.d1+d2t2", "actor.lora.rank=4"],
            "t of the trainer must be 1 with actor.lora: got d2p1t2. Write t1 and d4",
        ),
        (["actor.path=tiny", "allocation_mode=vllm.d1+d1"], "must be installed: got vllm.d1p1t1+d1p1t1"),
        (["actor.path=tiny", "allocation_mode=vllm.d1+d1", "launcher.server_python=/no/python"], "server_python must"),
        (["actor.path=tiny", "allocation_mode=vllm.d1p2+d1", "rollout.weight_update=disk"], "vllm must have p1 "),
        (
            ["actor.path=tiny", "allocation_mode=vllm.d1+d1", "vllm.tensor-parallel-size=2"],
            "got tensor-parallel-size. ",
        ),
        (["actor.path=tiny", "allocation_mode=vllm.d1+d1", "vllm.model=other"], "got model. Remove"),
        (["actor.path=tiny", "allocation_mode=sglang.d1+d1", "sglang.random-seed=x"], "sglang.random_seed must be a"),
        (["actor.path=tiny", "allocation_mode=lite.d1t2+d1"], "servers of lite must have p1t1"),
        (["actor.path=tiny", "allocation_mode=sglang.d1p2+d1", "rollout.weight_update=disk"], "sglang must have p1 "),
        (["actor.path=tiny", "allocation_mode=sglang.d1+d1"], "must be installed: got sglang.d1p1t1+d1p1t1"),
        (
            ["actor.path=tiny", "allocation_mode=sglang.d1+d1", "sglang.port=1"],
            "leave base_gpu_id, host, model_path, port",
        ),
        (["actor.path=/no/model", "allocation_mode=lite.d1+d1"], "actor.path must be a folder or a hub id: got"),
        (["model.path=./no", "allocation_mode=d1"], "model.path must be a folder or a hub id: got ./no"),
        (["model.path=tiny", "allocation_mode=lite.d1+d1"], "Write allocation_mode=d1p1t1"),
        (["model.path=tiny", "allocation_mode=lite.d1|d1"], "Write allocation_mode=d1p1t1"),
        (["actor.path=tiny", "allocation_mode=lite.d1|d1", "rollout.server_addrs=[h:1]"], "server_addrs must be left"),
        (
            ["actor.path=tiny", "allocation_mode=lite.d1|d1", "rollout.weight_update=disk"],
            "whose server has the weights already: got disk",
        ),
        (["actor.path=tiny", "allocation_mode=lite.d1|d1", "workers.actor.ranks=1"], "workers must be left out with"),
        (
            ["actor.path=tiny", "allocation_mode=sglang.d1|d1", "rollout.weight_update=broadcast"],
            "as NCCL refuses two ranks on one GPU: got broadcast",
        ),
        (
            ["actor.path=tiny", "allocation_mode=sglang.d1|d1", "rollout.weight_update_senders=1"],
            "weight_update_senders must be left out with allocation_mode=sglang.d1p1t1|d1p1t1, as NCCL refuses",
        ),
        (
            ["actor.path=tiny", "allocation_mode=vllm.d1|d1", "rollout.pause_mode=retract"],
            "whose servers sleep when nothing runs: got retract",
        ),
        (
            [
                *("actor.path=tiny", "allocation_mode=sglang.d1|d1", "sglang.enable_memory_saver=false"),
                "cluster.n_gpus_per_node=1",
            ],
            "got enable_memory_saver. Remove",
        ),
        (
            ["actor.path=tiny", "allocation_mode=sglang.d2|d2", "cluster.n_gpus_per_node=1"],
            "which needs 2 GPUs, and 1 x 1",
        ),
        (["model.path=tiny", "allocation_mode=d1", "cluster.n_nodes=2"], "cluster.n_nodes must be 1"),
        (["model.path=tiny", "allocation_mode=d9", "cluster.n_gpus_per_node=16"], "needs 9, and 8 GPUs on this node"),
    ],
)
def test_refusals(load, nvidia_smi, overrides, message):
    with pytest.raises(ConfigError) as error:
        plan_of(load(*overrides))
    assert message in str(error.value)
