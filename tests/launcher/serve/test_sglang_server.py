from __future__ import annotations

import json
import os
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import tiny_models

import arealite
from arealite.api.errors import ConfigError
from arealite.launcher.serve.sglang_server import check_options, main

PYTHON = os.environ.get("AREALITE_SGLANG_PYTHON", "")
needs_sglang = pytest.mark.skipif(
    not PYTHON, reason="AREALITE_SGLANG_PYTHON names no interpreter with SGLang installed"
)
CPU = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
SEVERAL_CHECKS = """
import contextlib, io, json, sys
from arealite.launcher.serve.sglang_server import main
results = []
for flags in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(flags)
    refusals = [line for line in err.getvalue().splitlines() if "ConfigError" in line]
    results.append({"status": status, "out": out.getvalue(), "refusals": refusals})
print(json.dumps(results))
"""


def test_memory_is_given_back_only_where_the_package_for_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = Namespace(enable_memory_saver=True)
    with pytest.raises(ConfigError, match=r"^torch_memory_saver must be installed beside SGLang for enable_memory_s"):
        check_options(flags)
    (tmp_path / "torch_memory_saver.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    check_options(flags)


def test_an_interpreter_without_sglang_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--model-path", "m"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "ModuleNotFoundError: No module named 'sglang'" in told.err
    assert "launcher.server_python" in told.err


@needs_sglang
def test_the_installed_sglang_judges_its_flags(tmp_path: Path) -> None:
    model = ["--model-path", tiny_models.save_qwen3(tmp_path / "model", seed=1), *CPU]
    taken, unknown, invalid, conflicting, cutting, missing = run_checks(
        [
            [*model, "--weight-version", "0"],
            [*model, "--tp-sise", "2"],
            [*model, "--dtype", "float33"],
            [*model, "--enable-deterministic-inference"],
            [*model, "--allow-auto-truncate"],
            ["--model-path", str(tmp_path / "nothing"), *CPU],
        ]
    )
    answer = json.loads(taken["out"])
    assert (taken["status"], taken["refusals"]) == (0, [])
    assert answer["program"] == "sglang"
    assert int(answer["version"].split(".")[1]) >= 4
    for refused, words in [
        (unknown, "got unrecognized arguments: --tp-sise 2. Write --tp-size"),
        (invalid, "got argument --dtype: invalid choice: 'float33'"),
        (conflicting, "backends are supported for deterministic inference"),
        (cutting, "allow_auto_truncate must be off"),
        (missing, "nothing"),
    ]:
        assert (refused["status"], refused["out"], len(refused["refusals"])) == (2, "", 1)
        assert words in refused["refusals"][0]


def run_checks(flags: list[list[str]]) -> list[dict[str, Any]]:
    """Check each list of flags with the real SGLang, all in one process because importing it takes seconds."""
    environment = os.environ | {"PYTHONPATH": str(Path(arealite.__file__).parents[1]), "SGLANG_USE_CPU_ENGINE": "0"}
    command = [PYTHON, "-c", SEVERAL_CHECKS, json.dumps([["--check", *words] for words in flags])]
    environment |= {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results
