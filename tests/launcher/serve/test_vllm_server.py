"""What the wrapper of vLLM refuses before it starts, judged by the installed vLLM itself where there is one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from testing_quickstart import make_tiny_model

import arealite
from arealite.api.errors import ConfigError
from arealite.launcher.serve.vllm_server import check_reloads, without_needless
from arealite.launcher.serve.wrapper import explain

PYTHON = os.environ.get("AREALITE_VLLM_PYTHON", "")
VLLM = {"program": "vLLM", "block": "vllm"}
needs_vllm = pytest.mark.skipif(not PYTHON, reason="AREALITE_VLLM_PYTHON names no interpreter with vLLM installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=64, layers=1, max_position=1024, tie=False)


def run(*flags: str, python: str = PYTHON) -> subprocess.CompletedProcess[str]:
    """Run the wrapper with the interpreter of vLLM's environment."""
    environment = os.environ | {"PYTHONPATH": str(Path(arealite.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    command = [python, "-m", "arealite.launcher.serve.vllm_server", *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False, cwd="/")


def test_unknown_flags_are_told_with_those_that_resemble_them():
    options = ["--max-model-len", "--max-num-seqs", "--dtype"]
    told = explain("unrecognized arguments: --max-modle-len --nothing=3", options, **VLLM)
    assert told == (
        "flags of vLLM must be known to the installed version: got unrecognized arguments: --max-modle-len "
        "--nothing=3. Write --max-model-len for --max-modle-len."
    )
    told = explain("unrecognized arguments: --nothing", options, **VLLM)
    assert told.endswith("got unrecognized arguments: --nothing. Correct the vllm block.")


def test_bad_values_are_told_as_they_are():
    told = explain("argument --port: invalid int value: 'x'", ["--port"], **VLLM)
    assert told == ("flags of vLLM must be valid: got argument --port: invalid int value: 'x'. Correct the vllm block.")


def test_a_switch_without_an_opposite_is_off_unless_it_is_given():
    flags = ["--model", "no-model", "--no-disable-log-stats", "--no-enable-x", "--no-nothing"]
    options = ["--model", "--disable-log-stats", "--enable-x", "--no-enable-x"]
    assert without_needless(flags, options) == ["--model", "no-model", "--no-enable-x", "--no-nothing"]


def test_what_is_packed_once_on_a_cpu_is_refused():
    for is_tied, has_experts in [(True, True), (True, False), (False, True)]:
        with pytest.raises(ConfigError, match=r"must have tie_word_embeddings=false and no experts, .* got models/m\."):
            check_reloads("models/m", is_tied=is_tied, has_experts=has_experts, device="cpu")
    check_reloads("models/m", is_tied=False, has_experts=False, device="cpu")
    check_reloads("models/m", is_tied=True, has_experts=True, device="cuda")


def test_an_interpreter_without_vllm_is_named():
    shown = run("--help", python=sys.executable)
    told = shown.stderr
    assert shown.returncode == 2
    assert "the interpreter of the servers must have a working vLLM: got" in told
    assert "Set launcher.server_python" in told and len(told.splitlines()) == 1


@pytest.mark.long
@needs_vllm
def test_a_check_tells_the_program_in_one_line(model):
    switches = ("--no-disable-log-stats", "--no-enable-prefix-caching")
    done = run("--check", "--model", str(model), "--dtype", "float32", "--max-model-len", "512", *switches)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["program"] == "vllm" and re.match(r"\d+\.\d+", found["version"])
    assert found["device"] in ("cpu", "cuda")


@needs_vllm
@pytest.mark.parametrize(
    "flags, told",
    [
        (["--check", "--max-modle-len", "512"], "Write --max-model-len"),
        pytest.param(["--dtype", "float12"], "argument --dtype: invalid choice: 'float12'", marks=pytest.mark.long),
        (["--tensor-parallel-size", "3"], "attention heads \\(2\\) must be divisible by tensor parallel size \\(3\\)"),
    ],
)
def test_refused_flags_end_in_one_line_before_a_model_is_loaded(model, flags, told):
    done = run("--model", str(model), *flags)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.match(f"arealite\\.api\\.errors\\.ConfigError: .*{told}", last), last
