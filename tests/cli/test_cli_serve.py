"""`arealite serve`: what it makes of a run's folder and registry, and one real server that joins."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import save_qwen3

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.api.config.loader import to_yaml
from arealite.cli.main import main
from arealite.utils.environment import SECRET_VARIABLE
from arealite.utils.name_resolve import NameRepository, make_repository
from arealite.utils.network import LOOPBACK
from arealite.utils.secret import SECRET_FILE, ensure_secret
from arealite.utils.server_record import ServerRecord, servers_root

DEADLINE_S = 180.0
ROOT = servers_root("exp", "trial")


class RunningRun:
    """The folder and the registry of a run."""

    def __init__(self, fileroot: Path) -> None:
        self.fileroot = fileroot
        self.folder = fileroot / "exp" / "trial"
        self.folder.mkdir(parents=True)
        self.model = save_qwen3(fileroot / "model", seed=0)
        self.config = fileroot / "given.yaml"
        self.config.write_text(
            f"experiment_name: exp\ntrial_name: trial\nallocation_mode: lite.d1+d1\nactor: {{path: {self.model}}}\n"
            f"cluster: {{n_gpus_per_node: 0, fileroot: {fileroot}}}\ntrain_dataset: {{path: gsm8k, batch_size: 4}}\n"
            "gconfig: {max_new_tokens: 16}\nlite: {context: 128, threads: 1}\nown_key: 1\n"
        )
        config, _ = load_expr_config(["--config", str(self.config)], GRPOConfig, ignore_unknown=True)
        (self.folder / "config.yaml").write_text(to_yaml(config))
        self.secret = ensure_secret(self.folder)
        self.names: NameRepository = make_repository("nfs", nfs_record_root=fileroot)

    def add_server(self, address: str, *, backend: str = "lite", node: str = platform.node(), secret: str = "") -> None:
        key = f"{ROOT}/server-0"
        record = ServerRecord(address, backend, node, 1, "ready", "", 0.0)
        self.names.add(key, record.to_text(key, secret or self.secret), replace=True)

    def record(self, state: str) -> ServerRecord | None:
        """Return the first server in this state."""
        records = [ServerRecord.read(key, text, self.secret) for key, text in self.names.items(ROOT).items()]
        return next((one for one in records if one.state == state), None)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningRun]:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    running = RunningRun(tmp_path / "runs")
    yield running
    running.names.reset()


def dry(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["serve", "--dry-run", *arguments])
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def test_the_command_is_the_launchers(run: RunningRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.add_server(f"{LOOPBACK}:4242")
    status, shown = dry(
        capsys, "--join", "exp/trial", "--fileroot", str(run.fileroot), "lite.slots=8", "lite.threads=2"
    )
    ours, _, servers = shown.partition(" -- ")
    assert (
        status == 0
        and f"--backend lite --name {platform.node()}-{os.getpid()} --host {LOOPBACK} --join exp/trial" in ours
    )
    assert f"--name-resolve nfs --registry {run.fileroot} --setup-timeout 600" in ours
    assert (
        "-m arealite.server " in servers and f"--threads 2 --slots 8 --context 128 --model-path {run.model}" in servers
    )
    assert run.secret not in shown, "a command line is seen by everybody"
    assert main(["serve", "--dry-run", "--config", str(run.config), "--port", "8000", "--host", "10.1.1.1"]) == 0
    alone = capsys.readouterr().out
    assert "--join" not in alone and "--registry" not in alone and "--host 10.1.1.1 --port 8000" in alone


def test_where_it_listens_follows_the_runs_servers(run: RunningRun, capsys: pytest.CaptureFixture[str]) -> None:
    join = ["--join", "exp/trial", "--fileroot", str(run.fileroot)]
    run.add_server(f"{LOOPBACK}:4242", node="another")
    assert f"--host {LOOPBACK} " not in dry(capsys, *join)[1]
    run.add_server("192.0.2.99:4242")
    assert f"--host {LOOPBACK} " not in dry(capsys, *join)[1]
    status, shown = dry(capsys, *join, "--host", LOOPBACK)
    assert status == 2 and f"must be an address that the run's trainers reach: got {LOOPBACK}" in shown
    assert "--host 10.7.7.7 " in dry(capsys, *join, "--host", "10.7.7.7")[1]


def test_a_folder_that_is_mounted_elsewhere(
    run: RunningRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mount").symlink_to(run.fileroot)
    status, shown = dry(capsys, "--join", "exp/trial", "--fileroot", str(tmp_path / "mount"))
    assert status == 0 and f"--registry {tmp_path}/mount " in shown


def test_a_folder_that_is_not_seen(
    run: RunningRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.folder / SECRET_FILE).rename(run.folder / "hidden")
    join = ["--join", "exp/trial", "--config", str(run.config), "experiment_name=other"]
    status, shown = dry(capsys, *join)
    assert status == 2 and f"the secret of the run must be known: got nothing in {SECRET_VARIABLE}" in shown
    monkeypatch.setenv(SECRET_VARIABLE, run.secret)
    status, shown = dry(capsys, *join)
    assert status == 0 and "--join exp/trial" in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "serve must be told what to serve"),
        (["--join", "exp"], "--join must be EXPERIMENT/TRIAL: got exp"),
        (["--join", "exp/trial/x"], "--join must be EXPERIMENT/TRIAL: got exp/trial/x"),
        (["--join", "exp/gone"], "--join must name a run that has begun to train: got exp/gone"),
        (["--join", "exp/trial", "actor.path=/gone"], "actor.path must be a folder or a hub id: got /gone"),
        (["--join", "exp/trial", "allocation_mode=d1"], "allocation_mode must name servers: got d1"),
        (["--join", "exp/trial", "rollout.server_addrs=a:1"], "rollout.server_addrs must be empty for servers to join"),
        (["--join", "exp/trial", "cluster.name_resolve.type=redis", "cluster.name_resolve.redis_addr=127.0.0.1:1"],
         "the registry of the run must be reached"),
    ],
)  # fmt: skip
def test_refusals(run: RunningRun, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    status, shown = dry(capsys, "--fileroot", str(run.fileroot), *arguments)
    assert status == 2 and shown.startswith("ConfigError: ") and told in shown


def test_servers_of_another_kind_or_secret(run: RunningRun, capsys: pytest.CaptureFixture[str]) -> None:
    join = ["--join", "exp/trial", "--fileroot", str(run.fileroot)]
    run.add_server(f"{LOOPBACK}:4242", backend="sglang")
    status, shown = dry(capsys, *join)
    assert status == 2 and "must be of the run's backend: got lite, and it has sglang" in shown
    run.add_server(f"{LOOPBACK}:4242", secret="other")
    status, shown = dry(capsys, *join)
    assert status == 2 and "must be the secret of the run: got another one" in shown


def test_a_server_joins_and_leaves(run: RunningRun) -> None:
    command = [sys.executable, "-m", "arealite.cli.main", "serve", "--join", "exp/trial", "--host", LOOPBACK]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--fileroot", str(run.fileroot)], env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while (record := run.record("ready")) is None:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        assert record.pid == process.pid and record.backend == "lite", "it became the program that serves"
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
        assert run.names.items(ROOT) == {}
    finally:
        process.kill()
