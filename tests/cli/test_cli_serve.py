"""`arealite serve`: what it makes of a run's folder and registry, and one real server that joins."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import wire
from harness.wire import Answer
from testing_registry import RunningRegistry
from tiny_models import build, config, save_qwen3, tokenizer

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.api.config.loader import to_yaml
from arealite.cli.main import main
from arealite.utils.network import LOOPBACK, host_ip
from arealite.utils.processes import REGISTRY_VARIABLE
from arealite.utils.secret import SECRET_VARIABLE, ensure_secret

DEADLINE_S = 180.0


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
        loaded, _ = load_expr_config(["--config", str(self.config)], GRPOConfig, ignore_unknown=True)
        (self.folder / "config.yaml").write_text(to_yaml(loaded))
        self.secret = ensure_secret(self.folder)
        self.registry = RunningRegistry(self.secret, self.folder / "registry.json")

    def tell(self, **changes: str) -> None:
        """Change what the run folder says of the registry."""
        told = json.loads((self.folder / "registry.json").read_text())
        (self.folder / "registry.json").write_text(json.dumps(told | changes))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningRun]:
    for variable in (SECRET_VARIABLE, REGISTRY_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    running = RunningRun(tmp_path / "runs")
    yield running
    running.registry.close()


def dry(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["serve", "--dry-run", *arguments])
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def test_the_command_is_the_launchers(run: RunningRun, capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = dry(
        capsys, "--join", "exp/trial", "--fileroot", str(run.fileroot), "lite.slots=8", "lite.threads=2"
    )
    ours, _, servers = shown.partition(" -- ")
    assert status == 0 and f"--backend lite --name {platform.node()}-{os.getpid()} --host {LOOPBACK}" in ours
    assert (
        "-m arealite.server " in servers
        and f"--threads 2 --slots 8 --context 128 --device cpu --model-path {run.model}" in servers
    )
    assert run.secret not in shown, "a command line is seen by everybody"
    assert main(["serve", "--dry-run", "--config", str(run.config), "--port", "8000", "--host", "10.1.1.1"]) == 0
    alone = capsys.readouterr().out
    assert "--port 8000 --host 10.1.1.1" in alone


def test_a_server_for_no_run_uses_the_gpus_that_are_there(
    run: RunningRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    keys = ("allocation_mode=lite.d1", "lite.slots=8")
    status, shown = dry(capsys, *keys, "--port", "8000", f"actor.path={run.model}")
    assert (
        status == 0 and f"--backend lite --name {platform.node()}-{os.getpid()} --port 8000 --host {LOOPBACK}" in shown
    )
    assert "--slots 8" in shown and f"--model-path {run.model}" in shown
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    status, shown = dry(capsys, "allocation_mode=sglang.d1t2", f"actor.path={run.model}")
    assert status == 2 and "got sglang.d1t2, which needs 2 GPUs, and 1 x 1 GPUs" in shown
    status, shown = dry(capsys, *keys)
    assert status == 2 and "actor.path must be given" in shown
    status, shown = dry(capsys, f"actor.path={run.model}")
    assert status == 2 and "allocation_mode must name servers: got nothing" in shown


def test_where_it_listens_follows_the_runs_registry(run: RunningRun, capsys: pytest.CaptureFixture[str]) -> None:
    join = ["--join", "exp/trial", "--fileroot", str(run.fileroot)]
    assert f"--host {LOOPBACK} " in dry(capsys, *join)[1]
    assert "--host 10.7.7.7 " in dry(capsys, *join, "--host", "10.7.7.7")[1]
    run.tell(node="another")
    status, shown = dry(capsys, *join)
    assert status == 2 and f"it listens at {run.registry.address} of another alone. Join from there" in shown


def test_where_it_listens_if_other_nodes_reach_the_registry(
    run: RunningRun, capsys: pytest.CaptureFixture[str]
) -> None:
    if (outside := host_ip()) == LOOPBACK:
        pytest.skip("this machine has no address but loopback")
    join = ["--join", "exp/trial", "--fileroot", str(run.fileroot)]
    run.registry.stop()
    run.registry.restart(outside)
    status, shown = dry(capsys, *join)
    assert status == 0 and f"--host {LOOPBACK} " not in shown
    assert "--host 10.7.7.7 " in dry(capsys, *join, "--host", "10.7.7.7")[1]


def test_a_folder_that_is_mounted_elsewhere(
    run: RunningRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mount").symlink_to(run.fileroot)
    assert dry(capsys, "--join", "exp/trial", "--fileroot", str(tmp_path / "mount"))[0] == 0


def test_a_run_that_has_ended_and_one_that_has_not_begun(run: RunningRun, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand, servers may be started first: from the config, since the run has not written its own yet."""
    join = ["--join", "exp/trial"]
    run.registry.stop()
    status, shown = dry(capsys, *join, "--fileroot", str(run.fileroot))
    assert status == 2 and "registry.json must say where the registry of the run is" in shown
    assert dry(capsys, *join, "--config", str(run.config), "--host", "10.7.7.7")[0] == 0
    run.registry.restart()
    run.tell(address=f"{LOOPBACK}:1")
    status, shown = dry(capsys, *join, "--fileroot", str(run.fileroot))
    assert status == 2 and "the registry of the run must be reached: the registry of the run at 127.0.0.1:1" in shown


def test_a_folder_that_is_not_seen(
    run: RunningRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.folder.rename(run.folder.with_name("hidden"))
    join = ["--join", "exp/trial", "--config", str(run.config), "experiment_name=other"]
    status, shown = dry(capsys, *join)
    assert status == 2 and f"the secret of the run must be known: got nothing in {SECRET_VARIABLE}" in shown
    monkeypatch.setenv(SECRET_VARIABLE, run.secret)
    status, shown = dry(capsys, *join)
    assert status == 2 and f"set {REGISTRY_VARIABLE}=HOST:PORT" in shown
    monkeypatch.setenv(REGISTRY_VARIABLE, run.registry.address)
    assert dry(capsys, *join)[0] == 0
    run.folder.with_name("hidden").rename(run.folder)


@pytest.mark.parametrize("text", ["\xff", "short", "[" * 100_000], ids=["no ASCII", "short", "long"])
def test_a_secret_that_no_run_wrote_is_named(run: RunningRun, capsys: pytest.CaptureFixture[str], text: str) -> None:
    file = run.folder / ".secret"
    file.write_text(text, encoding="latin-1")
    status, shown = dry(capsys, "--join", "exp/trial", "--fileroot", str(run.fileroot))
    assert status == 2 and f"{file} can't be read: " in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "actor.path must be given"),
        (["--join", "exp"], "--join must be EXPERIMENT/TRIAL: got exp"),
        (["--join", "exp/trial/x"], "--join must be EXPERIMENT/TRIAL: got exp/trial/x"),
        (["--join", "exp/gone"], "--join must name a run that has begun to train: got exp/gone"),
        (["--join", "exp/trial", "actor.path=/gone"], "actor.path must be a folder or a hub id: got /gone"),
        (["--join", "exp/trial", "allocation_mode=d1"], "allocation_mode must name servers: got d1"),
        (["--join", "exp/trial", "rollout.server_addrs=a:1"], "rollout.server_addrs must be empty for servers to join"),
    ],
)  # fmt: skip
def test_refusals(run: RunningRun, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    status, shown = dry(capsys, "--fileroot", str(run.fileroot), *arguments)
    assert status == 2 and shown.startswith("ConfigError: ") and told in shown


def test_servers_of_another_secret(
    run: RunningRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    join = ["--join", "exp/trial", "--fileroot", str(run.fileroot)]
    monkeypatch.setenv(SECRET_VARIABLE, "other" * 4)
    status, shown = dry(capsys, *join)
    assert status == 2 and "must show the secret of the run: got none or another one" in shown


def test_a_server_joins_and_hands_back_exactly_the_tokens_so_far(run: RunningRun, tmp_path: Path) -> None:
    long = tmp_path / "long"
    build(config(max_position_embeddings=8192), seed=0).save_pretrained(long)
    tokenizer().save_pretrained(long)
    command = [sys.executable, "-m", "arealite.cli.main", "serve", "--join", "exp/trial", "--host", LOOPBACK]
    command += ["--fileroot", str(run.fileroot), f"actor.path={long}", "lite.context=8192", "lite.deterministic=true"]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)

    def ask(endpoint: str, body: object, secret: str | None = run.secret) -> Answer:
        return wire.ask(record.address, "POST", endpoint, body, timeout_s=DEADLINE_S, secret=secret)

    def sample(length: int) -> tuple[list[int], str]:
        params = {"max_new_tokens": length, "temperature": 0.0, "ignore_eos": True}
        reply = ask("/generate", {"input_ids": [5, 6, 2], "sampling_params": params}).body
        return reply["output_ids"], reply["meta_info"]["finish_reason"]["type"]

    def num_generated() -> int:
        about = wire.ask(record.address, "GET", "/server_info", timeout_s=DEADLINE_S, secret=run.secret)
        return int(about.body["generated_tokens"])

    try:
        (record,) = run.registry.wait_for(lambda servers: len(servers) == 1, DEADLINE_S).values()
        assert record.name == f"{platform.node()}-{process.pid}" and record.backend == "lite"
        assert ask("/generate", {}, secret=None).status == 401
        undisturbed, _ = sample(100)
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(sample, 8000)
            while num_generated() < 150:
                assert not reply.done()
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 0 and run.registry.servers == {}
        tokens, finish = reply.result()
        shorter = min(len(tokens), 100)
        assert finish == "abort" and shorter >= 40 and tokens[:shorter] == undisturbed[:shorter]
    finally:
        process.kill()
