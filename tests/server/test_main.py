from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import testing_forks
import torch
from safetensors.torch import load_file, save_file
from testing_quickstart import make_tiny_model

from arealite.server import __main__ as server
from arealite.server.__main__ import main
from arealite.utils.network import hold_port, port_of

Start = Callable[..., subprocess.Popen[str]]


def main_that_fails_later(argv: list[str]) -> int:
    """Serve with a model whose tenth call fails."""
    calls = itertools.count()

    def fail_later(module: torch.nn.Module, _: object) -> None:
        if "ForCausalLM" in type(module).__name__ and next(calls) == 10:
            raise RuntimeError("the chip melted")

    torch.nn.modules.module.register_module_forward_pre_hook(fail_later)
    server.FAILURE_NOTICE_S = 10.0
    return main(argv)


def main_with_three_threads(argv: list[str]) -> int:
    return main([*argv, "--threads", "3"])


@contextlib.contextmanager
def forked(program: Callable[[list[str]], int], model_path: str) -> Iterator[tuple[ForkServerProcess, str]]:
    """Run a server as a fork; yield the process and its URL once it is ready."""
    with hold_port() as holder:
        url, deadline = f"http://127.0.0.1:{port_of(holder)}", time.monotonic() + 120
        process = testing_forks.start(program, ["--model-path", model_path, "--port", str(port_of(holder))])
        try:
            while not is_ready(url):
                assert process.is_alive() and time.monotonic() < deadline
                time.sleep(0.02)
            yield process, url
        finally:
            process.kill()
            process.join()


def is_ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=120):
        return True
    return False


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-m", "arealite.server", *arguments]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def read_address(process: subprocess.Popen[str]) -> str:
    """Return the address that the server logs once it is ready."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"serving .* at (http://\S+)", line):
            return found[1]
    raise AssertionError(f"the server ended with {process.wait()}")


def post(url: str, body: object) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_serving_until_sigterm_answers_what_is_in_flight(start: Start, model_path: str) -> None:
    process = start(
        "--model-path", model_path, "--port", "0", "--weight-version", "3", "--context", "512", "--deterministic"
    )
    url = read_address(process)
    with urllib.request.urlopen(f"{url}/health", timeout=120) as response:
        assert response.status == 200
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 8, "sampling_seed": 1, "ignore_eos": True}}
    status, reply = post(f"{url}/generate", body)
    assert status == 200 and len(reply["output_ids"]) == 8
    assert reply["meta_info"]["weight_versions"] == [{"version": "3", "start": 0, "end": 8}]

    answers: list[tuple[int, dict[str, Any]]] = []
    params = {"max_new_tokens": 500, "ignore_eos": True}

    def ask(seed: int) -> None:
        one = {"input_ids": [5], "sampling_params": {**params, "sampling_seed": seed}}
        answers.append(post(f"{url}/generate", one))

    clients = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for client in clients:
        client.start()
    deadline = time.monotonic() + 120
    while json.load(urllib.request.urlopen(f"{url}/server_info", timeout=120))["running"] < 4:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    for client in clients:
        client.join(120)
    assert process.wait(120) == 0
    assert [status for status, _ in answers] == [200] * 4
    assert {reply["meta_info"]["finish_reason"]["type"] for _, reply in answers} <= {"abort", "length"}


def test_sigterm_does_not_wait_for_a_trainer_that_never_comes(model_path: str) -> None:
    with forked(main, model_path) as (process, url), socket.socket() as unanswered:
        unanswered.bind(("127.0.0.1", 0))
        unanswered.listen()
        body = {
            "master_address": "127.0.0.1",
            "master_port": unanswered.getsockname()[1],
            "rank_offset": 1,
            "world_size": 2,
            "group_name": "g",
        }

        def join() -> None:
            with pytest.raises((ConnectionError, urllib.error.URLError)):
                post(f"{url}/init_weights_update_group", body)

        client = threading.Thread(target=join)
        client.start()
        unanswered.accept()
        process.terminate()
        process.join(120)
        assert process.exitcode == 0
        client.join(120)


def test_only_the_thread_that_samples_has_threads_of_torch(tmp_path: Path) -> None:
    """If others had some, they would be more than the cores, and OpenMP lets threads sleep between any two products."""
    path = str(make_tiny_model(tmp_path / "model", layers=1, hidden=256, heads=4, mlp=768))
    sampled = {"input_ids": [*range(5, 200)], "sampling_params": {"max_new_tokens": 2}}
    with forked(main, path) as alone, forked(main_with_three_threads, path) as with_two_helpers:
        for _, url in (alone, with_two_helpers):
            assert post(f"{url}/generate", sampled)[0] == 200
            assert post(f"{url}/update_weights_from_disk", {"model_path": path})[0] == 200
            assert post(f"{url}/generate", sampled)[0] == 200

        def count(one: tuple[ForkServerProcess, str]) -> int:
            return psutil.Process(one[0].pid).num_threads()

        deadline = time.monotonic() + 120  # for threads of the requests to end
        while count(with_two_helpers) - count(alone) != 2:
            assert time.monotonic() < deadline, (count(alone), count(with_two_helpers))
            time.sleep(0.1)


def test_a_failed_engine_ends_the_process_with_an_error(model_path: str) -> None:
    with forked(main_that_fails_later, model_path) as (process, url):
        status, reply = post(f"{url}/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 100}})
        assert status == 500 and "the chip melted" in reply["error"]["message"]
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/health", timeout=120)
        process.join(120)
        assert process.exitcode == 1


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda weights: weights.write_bytes(weights.read_bytes()[:-100]), "must hold whole safetensors files: got"),
        (lambda weights: save_file(without_norm(weights), weights, {"format": "pt"}), "1 missing, model.norm.weight"),
    ],
)
def test_a_model_without_all_its_weights_is_not_served(
    model_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object], reason: str
) -> None:
    """As a download that was cut off leaves it; transformers would make up what is missing."""
    folder = shutil.copytree(model_path, tmp_path / "model")
    damage(folder / "model.safetensors")
    assert main(["--model-path", str(folder), "--port", "0"]) == 2
    assert f"can't serve {folder}: " in caplog.text and reason in caplog.text


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("config.json", {"num_hidden_layers": 3}, "got StrictDataclassClassValidationError: "),
        ("config.json", {"num_attention_heads": 0}, "got ZeroDivisionError: "),
        ("config.json", {"hidden_act": "unknown"}, "got KeyError: 'unknown'"),
        ("generation_config.json", {"eos_token_id": [[1]]}, "generation_config.json must be as its writer left it"),
    ],
)
def test_a_model_whose_config_contradicts_itself_is_not_served(
    model_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, change: dict[str, Any], reason: str
) -> None:
    folder = shutil.copytree(model_path, tmp_path / "model")
    file = folder / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | change))
    assert main(["--model-path", str(folder), "--port", "0"]) == 2
    assert f"can't serve {folder}: " in caplog.text and reason in caplog.text


def without_norm(weights: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in load_file(weights).items() if name != "model.norm.weight"}


def test_what_cannot_be_served_is_said_at_once(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["--model-path", "not/looked/for", "--port", str(taken.getsockname()[1])]) == 2
    assert "Address already in use" in caplog.text
    assert main(["--model-path", str(tmp_path), "--port", "0"]) == 2
    assert f"can't serve {tmp_path}" in caplog.text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--model-path", str(tmp_path), "--port", "0", "--device", "cuda"]) == 2
    assert "--device cuda must find a CUDA device: got none" in caplog.text
    assert main(["--model-path", str(tmp_path / "missing"), "--port", "0"]) == 2
    assert f"can't serve {tmp_path}/missing" in caplog.text
    with pytest.raises(SystemExit, match="2"):
        main(["--model-path", str(tmp_path), "--port", "0", "--slots", "0"])
    assert "--slots must be at least 1: got 0" in capsys.readouterr().err
    for port in ("-1", "65536"):
        with pytest.raises(SystemExit, match="2"):
            main(["--model-path", str(tmp_path), "--port", port])
        assert f"--port must be from 0 to 65535: got {port}" in capsys.readouterr().err
