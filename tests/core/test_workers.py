"""The Ray that a master starts on its node: who may use it, and what its workers and its logs learn of the master."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")
from arealite.api.cli_args import DPOConfig, load_expr_config
from arealite.api.errors import ConfigError
from arealite.core.workers import Workers

SCRIPT = """
import json, os, pathlib, sys
import ray
from arealite.api.cli_args import DPOConfig, load_expr_config
from arealite.core.worker import Call
from arealite.core.workers import Workers

class Probe:
    def __init__(self, config): pass
    def variable(self, name): return os.environ.get(name) if name != "niceness" else os.nice(0)

config, _ = load_expr_config(sys.argv[1:], DPOConfig)
with Workers(config) as workers:
    engine = workers.engine("model", Probe, config.model)
    def told(name):
        return engine.group.submit(Call("look", "model", "variable", (name,))).values.result()[0].value
    names = ("AREALITE_SECRET", "WANDB_API_KEY", "GLOO_SOCKET_IFNAME", "niceness")
    session = pathlib.Path(ray._private.worker._global_node.get_session_dir_path())
    facts = {name: told(name) for name in names} | {"master": os.environ["GLOO_SOCKET_IFNAME"]}
    print(json.dumps(facts | {"address": ray.get_runtime_context().gcs_address, "session": str(session)}), flush=True)
    sys.stdin.read()
"""
CONFIG = """
experiment_name: e
trial_name: t
cluster: {fileroot: ., n_gpus_per_node: 0}
model: {path: org/name}
train_dataset: {path: none.jsonl}
workers: {}
"""
STRANGER = "import ray, sys; ray.init(address=sys.argv[1])"
SECRETS = {"AREALITE_SECRET": "the-secret-of-this-run-0123456789abcdef", "WANDB_API_KEY": "the-key-of-this-user"}
pytestmark = pytest.mark.slow


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Return a folder whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_a_ray_of_its_own_wants_the_secret_and_logs_none_and_does_not_yield(tmp_path: Path, ray_folder: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "GLOO_SOCKET_IFNAME")}
    env = {name: value for name, value in env.items() if not name.startswith("RAY_")}
    env |= {"HOME": str(tmp_path), "RAY_TMPDIR": str(ray_folder)}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "--config", "config.yaml"],
        cwd=tmp_path,
        env=env | SECRETS,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as master:
        assert master.stdin is not None and master.stdout is not None
        told = json.loads(master.stdout.readline())
        with subprocess.Popen(
            [sys.executable, "-c", STRANGER, told["address"]],
            env=env | {"RAY_AUTH_MODE": "disabled"},
            text=True,
            stderr=subprocess.PIPE,
        ) as stranger:  # Ray tries it for long
            assert stranger.stderr is not None
            refusal = next((line for line in stranger.stderr if "InvalidAuthToken" in line), "")
            stranger.kill()
        files = [path for path in Path(told["session"]).rglob("*") if path.is_file()]
        assert any(path.name == "runtime_env_agent.log" for path in files)
        assert [path for path in files if any(one.encode() in path.read_bytes() for one in SECRETS.values())] == []
        master.stdin.close()
    assert master.returncode == 0
    assert [*ray_folder.glob("arealite-ray-*")] == []
    assert "Authentication token is missing or incorrect" in refusal
    assert {name: told[name] for name in SECRETS} == SECRETS
    assert (told["master"], told["GLOO_SOCKET_IFNAME"]) == ("lo", None)  # ranks on other nodes are not on our loopback
    assert told["niceness"] <= os.nice(0), "workers come after no other process of the node"
    assert (tmp_path / "e" / "t" / ".secret").read_text().strip() == SECRETS["AREALITE_SECRET"]
    assert not (tmp_path / ".ray").exists()  # where Ray keeps a token of its own, that others may read


def test_a_batch_has_parts_for_groups_that_are_not_there_so_far(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    given = ["--config", str(tmp_path / "config.yaml"), "ref={}", "workers.ref.ranks=3"]
    assert Workers(load_expr_config(given, DPOConfig)[0]).num_parts == 3
    divided = [*given, "workers.model.parallel=d4c2"]
    assert Workers(load_expr_config(divided, DPOConfig)[0]).num_parts == 4, "blocks, not ranks"


def test_a_master_is_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    config, _ = load_expr_config(["--config", str(tmp_path / "config.yaml")], DPOConfig)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="a script with workers must be one process, the master: got 2 of torchrun"):
        Workers(config)
