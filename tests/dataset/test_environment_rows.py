"""The command of an environment of verifiers, and its rows; tests/ecosystem runs real ones."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from arealite.dataset import get_custom_dataset
from arealite.dataset.verifiers import command_of


def test_options_are_keys_of_the_environments_config(tmp_path: Path) -> None:
    path = f"verifiers:{tmp_path}/my_env.py?python=/venv/bin/python&tasks=7&taskset.size=3&agent.harness.id=bash"
    (python, _, config, folder, number), variables = command_of(path)
    assert json.loads(config) == {"taskset": {"id": "my_env", "size": 3}, "agent": {"harness": {"id": "bash"}}}
    assert (python, folder, number, variables["PYTHONPATH"]) == ("/venv/bin/python", str(tmp_path), "7", str(tmp_path))
    assert variables["PATH"].startswith(f"/venv/bin{os.pathsep}")


@pytest.mark.parametrize(
    ("name", "taskset"), [("my_env", "my_env"), ("my_env.py", "my_env"), ("owner-env", "owner-env")]
)
def test_an_environment_is_a_module_or_a_file_of_this_folder(name: str, taskset: str) -> None:
    (python, _, config, folder, _), _ = command_of(f"verifiers:{name}")
    assert json.loads(config) == {"taskset": {"id": taskset}} and (python, folder) == (sys.executable, str(Path.cwd()))


def test_an_interpreter_without_verifiers_is_named() -> None:
    with pytest.raises(ValueError, match=r"must be an environment of verifiers 0\.4: got ModuleNotFoundError.*python="):
        get_custom_dataset("verifiers:my_env", type="rl")
