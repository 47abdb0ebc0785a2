from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import testing_forks
import torch
from safetensors.torch import load_file, save_file

from arealite.server.__main__ import main
from arealite.utils.network import hold_port, port_of


def main_that_fails_later(argv: list[str]) -> int:
    """Serve with a model whose tenth call fails."""
    calls = itertools.count()

    def fail_later(module: torch.nn.Module, _: object) -> None:
        if "ForCausalLM" in type(module).__name__ and next(calls) == 10:
            raise RuntimeError("the chip melted")

    torch.nn.modules.module.register_module_forward_pre_hook(fail_later)
    return main(argv)


@contextlib.contextmanager
def forked(program: Callable[[list[str]], int], model_path: str, *more: str) -> Iterator[tuple[ForkServerProcess, str]]:
    """Run a server as a fork; yield the process and its URL once it is ready."""
    with hold_port() as holder:
        url, deadline = f"http://127.0.0.1:{port_of(holder)}", time.monotonic() + 120
        process = testing_forks.start(program, ["--model-path", model_path, "--port", str(port_of(holder)), *more])
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


def post(url: str, body: object) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_sigterm_answers_what_is_in_flight(model_path: str) -> None:
    with forked(main, model_path, "--weight-version", "3", "--context", "512", "--deterministic") as (process, url):
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
        with ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(post, f"{url}/generate", body) for _ in range(4)]
            deadline = time.monotonic() + 120
            while json.load(urllib.request.urlopen(f"{url}/server_info", timeout=120))["running"] < 4:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process.terminate()
            answers = [one.result(120) for one in asked]
        process.join(120)
        assert process.exitcode == 0
    for status, reply in answers:
        assert status == 200 and reply["meta_info"]["finish_reason"]["type"] in ("abort", "length")
        assert reply["meta_info"]["weight_version"] == "3"


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


def test_a_failed_engine_ends_the_process_with_an_error(model_path: str) -> None:
    with forked(main_that_fails_later, model_path) as (process, url):
        status, reply = post(f"{url}/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 100}})
        assert status == 500 and "the chip melted" in reply["error"]["message"]
        process.join(120)
        assert process.exitcode == 1


def changed(name: str, **change: Any) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | change))

    return write


def without_norm(folder: Path) -> None:
    weights = load_file(file := folder / "model.safetensors")
    save_file({name: one for name, one in weights.items() if name != "model.norm.weight"}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without_norm, "1 missing, model.norm.weight"),  # transformers would make it up
        (changed("config.json", num_hidden_layers=3), "got StrictDataclassClassValidationError: "),
        (changed("config.json", num_attention_heads=0), "got ZeroDivisionError: "),
        (changed("config.json", hidden_act="unknown"), "got KeyError: 'unknown'"),
        (
            changed("generation_config.json", eos_token_id=[[1]]),
            "generation_config.json must be as its writer left it",
        ),
    ],
)
def test_a_damaged_model_is_not_served(
    model_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object], reason: str
) -> None:
    folder = shutil.copytree(model_path, tmp_path / "model")
    damage(folder)
    assert main(["--model-path", str(folder), "--port", "0"]) == 2
    assert f"can't serve {folder}: " in caplog.text and reason in caplog.text


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
