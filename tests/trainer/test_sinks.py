import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from arealite.api.cli_args import StatsLoggerConfig, TensorBoardConfig
from arealite.api.errors import ConfigError
from arealite.trainer.stats_logger import open_sinks


def config_of(folder: Path, **services: object) -> StatsLoggerConfig:
    return StatsLoggerConfig(experiment_name="exp", trial_name="t0", fileroot=str(folder), **services)


def test_neither_services_that_nobody_asked_for_nor_the_viewer_are_imported() -> None:
    program = (
        "import sys; from pathlib import Path; from arealite.api.cli_args import StatsLoggerConfig\n"
        "from arealite.trainer.stats_logger import open_sinks\n"
        "assert open_sinks(StatsLoggerConfig(), folder=Path('.'), resolved={}) == []\n"
        "print(sorted({'wandb', 'swanlab', 'tensorboard', 'trackio', 'arealite.viewer'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert output.stdout == "[]\n"


def test_tensorboard_holds_every_number(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = config_of(tmp_path, tensorboard=TensorBoardConfig(path=str(tmp_path / "tb")))
    (sink,) = open_sinks(config, folder=tmp_path, resolved={})
    for step in range(3):
        sink.write(step, {"reward/mean": 0.5 * step, "time/step_s": 2.0})
    sink.close()
    logging.getLogger("tensorboard").setLevel(logging.WARNING)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["reward/mean", "time/step_s"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 0.0), (1, 0.5), (2, 1.0)]


@pytest.mark.parametrize(
    ("package", "services"),
    [
        ("tensorboard", {"tensorboard": TensorBoardConfig(path="tb")}),
        ("wandb", {"wandb": {"mode": "offline"}}),
        ("swanlab", {"swanlab": {"mode": "local"}}),
        ("trackio", {"trackio": {"mode": "online"}}),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, services: dict[str, object]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what Python itself does for "not importable"
    with pytest.raises(ConfigError, match=rf"stats_logger\.{package}\..*pip install 'arealite\[{package}\]'"):
        open_sinks(config_of(tmp_path, **services), folder=tmp_path, resolved={})


RECORDER = """
import json, os
calls = []
def record(name):
    def call(*args, **kwargs):
        with open(os.environ["RECORD"], "a") as file:
            file.write(json.dumps([name, list(args), kwargs]) + "\\n")
        return Run()
    return call
class Run:
    log = staticmethod(record("log"))
    finish = staticmethod(record("finish"))
init, log, finish = record("init"), record("log"), record("finish")
"""


@pytest.mark.parametrize(
    ("package", "services", "init"),
    [
        (
            "wandb",
            {"wandb": {"mode": "offline", "entity": "us", "job_type": "rl", "group": "g", "notes": "n", "tags": ["a"],
                       "save_code": True, "config": {"extra": 1}}},
            {"mode": "offline", "entity": "us", "job_type": "rl", "group": "g", "notes": "n", "tags": ["a"],
             "save_code": True, "project": "exp", "name": "t0", "dir": "FOLDER", "config": {"seed": 3, "extra": 1}},
        ),
        (
            "swanlab",
            {"swanlab": {"mode": "local", "project": "p", "logdir": "d", "config": {"seed": 4}}},
            {"mode": "local", "project": "p", "experiment_name": "t0", "logdir": "d", "config": {"seed": 4}},
        ),
        (
            "trackio",
            {"trackio": {"mode": "online", "name": "n", "space_id": "us/space"}},
            {"project": "exp", "name": "n", "space_id": "us/space", "config": {"seed": 3}},
        ),
    ],
)  # fmt: skip
def test_every_key_reaches_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, services: dict[str, object], init: dict[str, object]
) -> None:
    """A package of the service's name that writes down how it is called."""
    (tmp_path / f"{package}.py").write_text(RECORDER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.setenv("RECORD", str(tmp_path / "calls.jsonl"))
    (sink,) = open_sinks(config_of(tmp_path, **services), folder=tmp_path, resolved={"seed": 3})
    sink.write(2, {"reward/mean": 0.5})
    sink.close()
    del sys.modules[package]
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    init = {key: str(tmp_path) if value == "FOLDER" else value for key, value in init.items()}
    if package == "wandb":
        init["id"] = (tmp_path / ".wandb_id").read_text()
    assert calls == [["init", [], init], ["log", [{"reward/mean": 0.5}], {"step": 2}], ["finish", [], {}]]


def test_a_run_that_goes_on_goes_on_at_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text(RECORDER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("RECORD", str(tmp_path / "calls.jsonl"))
    config = config_of(tmp_path, wandb={"mode": "offline"})
    for start_step in (0, 5, 0):
        open_sinks(config, folder=tmp_path, resolved={}, start_step=start_step)
    del sys.modules["wandb"]
    calls = [json.loads(line)[2] for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [call.get("resume") for call in calls] == [None, "allow", None]
    first, resumed, fresh = (call["id"] for call in calls)
    assert first == resumed != fresh
