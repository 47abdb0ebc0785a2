"""The layouts that `arealite plan --measured` shows of runs of known costs."""

import re
from pathlib import Path

import pytest
from rich.console import Console
from testing_plans import CONFIGS, SECONDS, ppo_config, write_run

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.cli import plan_groups
from arealite.cli.plan_groups import load_config
from arealite.core.experiments import grpo, ppo
from arealite.launcher.plan.layout import make_layout

PPO = str(CONFIGS / "gsm8k_ppo_cpu.yaml")
KEYS = ("actor.path=/model", "async_training=false")


def run_of(folder: Path, *keys: str, seconds: dict[str, float] = SECONDS) -> str:
    config = ppo_config("async_training=false", *keys)
    return str(write_run(folder, config, ppo(config), seconds).path)


def show(run: str, *keys: str, config: str = PPO, devices: int | None = None) -> None:
    plan_groups.show(Console(highlight=False), load_config(config, keys), RunFolder(run), devices)


def rows(output: str) -> dict[str, list[str]]:
    """Return the cells of the table by the first one."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells[0] in ("as run", "config", *"12345")}


def test_the_best_layouts_are_shown_beside_that_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = run_of(tmp_path / "run", "workers={}")
    show(run, *KEYS, devices=2)
    output = capsys.readouterr().out
    assert f"3 steps of {run}, calls measured 15.000 s, predicted 15.000 s (+0.0%)" in output
    assert rows(output) == {
        "as run": ["actor+critic 1", "15.000", "36.000", "+0.0%"],
        "1": ["actor+critic 2", "8.250", "29.250", "-18.8%"],
        "2": ["actor 1, critic 1", "9.000", "30.000", "-16.7%"],  # of 15 + 20 for rollouts + 1
        "3": ["actor+critic 1", "15.000", "36.000", "+0.0%"],
    }
    assert "10% of each call is assumed to be serial." in output
    assert "Steps of the run took 36.000 s, of them rollout 20.000 s, weights 0.500 s." in output


def test_the_layout_of_the_config_is_shown_and_the_lines_of_the_best_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", "workers={}")
    show(run, *KEYS, "workers.actor.ranks=2")
    output = capsys.readouterr().out
    assert rows(output)["config"] == ["actor+critic 2", "8.250", "29.250", "-18.8%"]
    assert output.endswith("\nworkers:\n  actor: {ranks: 2}\n  critic: {share: actor}\n")


def test_the_lines_for_the_config_load_to_the_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("ref={}", "actor.kl_ctl=0.1")
    run = run_of(tmp_path / "run", "workers.actor.ranks=2", *keys, seconds=SECONDS | {"ref_inf": 3.0})
    more = ("workers.actor.strategy=SPREAD", "workers.restarts=5", "workers.rollout.num=2")
    show(run, *KEYS, *keys, *more, devices=3)
    output = capsys.readouterr().out
    text = output[output.index("workers:\n") :]
    (tmp_path / "pasted.yaml").write_text(Path(PPO).read_text() + text)
    config, _ = load_expr_config(["--config", str(tmp_path / "pasted.yaml"), *KEYS, *keys], type(ppo_config()))
    layout = make_layout(config)
    assert rows(output)["1"][0] == ", ".join(f"{'+'.join(one.roles)} {one.num_ranks}" for one in layout)
    assert sum(one.num_ranks for one in layout) == 3 and "share" in text
    assert config.workers is not None and config.workers.rollout.num == 2
    assert (layout[0].strategy, config.workers.restarts) == ("SPREAD", 5)


def test_a_run_that_waits_for_servers_that_never_pause_gets_no_shorter_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ppo_config("workers={}")
    run = write_run(tmp_path / "run", config, ppo(config), SECONDS)
    show(str(run.path), "actor.path=/model", devices=2)
    output = capsys.readouterr().out
    assert "That run waited for its servers" in output
    assert rows(output)["1"] == ["actor+critic 2", "8.250", "36.000", "+0.0%"]


def test_grpo_has_a_graph_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--config", str(CONFIGS / "gsm8k_grpo_cpu.yaml"), "actor.path=/model", "workers={}"]
    argv += ["actor.proximal=recompute"]
    config, _ = load_expr_config(argv, GRPOConfig)
    names = ("actor_inf", "advantages", "actor_train")
    run = write_run(tmp_path / "run", config, grpo(config), {name: SECONDS[name] for name in names})
    show(str(run.path), *argv[2:], config=argv[1], devices=2)
    assert rows(capsys.readouterr().out)["1"][:2] == ["actor 2", "3.850"]


def test_runs_of_other_work_are_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "workers={}", "gconfig.n_samples=4")
    with pytest.raises(ConfigError, match=f"config's gconfig.n_samples, 8: got 4 in {run}."):
        show(run, *KEYS)
