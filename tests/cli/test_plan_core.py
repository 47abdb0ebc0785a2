"""`arealite plan-core` on runs of known costs."""

import re
from pathlib import Path

import pytest
from testing_plans import CONFIGS, SECONDS, ppo_config, write_run

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.cli.main import main
from arealite.cli.plan_core import Cost
from arealite.core.experiments import grpo, ppo
from arealite.launcher.plan.layout import make_layout

PPO = str(CONFIGS / "gsm8k_ppo_cpu.yaml")
KEYS = ("actor.path=/model", "async_training=false")
PRICE = {name: Cost(seconds / 2, seconds / 2) for name, seconds in SECONDS.items()}


def run_of(folder: Path, *keys: str, price: dict[str, Cost] = PRICE) -> str:
    config = ppo_config("async_training=false", *keys)
    return str(write_run(folder, config, ppo(config), price).path)


def rows(output: str) -> dict[str, list[str]]:
    """Return the cells of the table by the first one."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells[0] in ("as run", "config", *"12345")}


def test_the_serial_part_is_assumed_of_a_run_on_one_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = run_of(tmp_path / "run", "workers={}")
    assert main(["plan-core", PPO, *KEYS, "--costs", run, "--devices", "2"]) == 0
    output = capsys.readouterr().out
    assert "actor+critic 1; 3 steps, calls measured 15.000 s, predicted 15.000 s (+0.0%)" in output
    assert rows(output) == {
        "as run": ["actor+critic 1", "15.000", "36.000", "+0.0%"],
        "1": ["actor+critic 2", "8.250", "29.250", "-18.8%"],
        "2": ["actor 1, critic 1", "9.000", "30.000", "-16.7%"],  # of 15 + 20 for rollouts + 1
        "3": ["actor+critic 1", "15.000", "36.000", "+0.0%"],
    }
    assert "10% of actor_inf, " in output and " is assumed to be serial" in output
    assert f"Steps of {run} took 36.000 s, of them rollout 20.000 s, weights 0.500 s." in output


def test_runs_on_several_ranks_need_no_assumption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of(tmp_path / str(number), f"workers.actor.ranks={number}") for number in (1, 2)]
    costs = [word for run in runs for word in ("--costs", run)]
    assert main(["plan-core", PPO, *KEYS, "workers.actor.ranks=2", *costs]) == 0
    output = capsys.readouterr().out
    assert rows(output)["config"] == ["actor+critic 2", "11.250", "32.250", "-10.4%"]
    assert rows(output)["1"] == ["actor 1, critic 1", "9.000", "30.000", "-16.7%"]
    assert "Critical path of 1: critic_inf 3.000 s, advantages 1.000 s, critic_train 5.000 s." in output
    assert "serial" not in output
    assert output.endswith("\nworkers:\n  actor: {ranks: 1}\n  critic: {ranks: 1}\n")


def test_the_lines_for_the_config_load_to_the_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("ref={}", "actor.kl_ctl=0.1")
    price = PRICE | {"ref_inf": Cost(0.25, 0.25)}
    runs = [run_of(tmp_path / str(number), f"workers.actor.ranks={number}", *keys, price=price) for number in (1, 2)]
    costs = [word for run in runs for word in ("--costs", run)]
    more = ("workers.actor.strategy=SPREAD", "workers.restarts=5", "workers.rollout.num=2")
    assert main(["plan-core", PPO, *KEYS, *keys, *more, *costs, "--devices", "2"]) == 0
    output = capsys.readouterr().out
    text = output[output.index("workers:\n") :]
    (tmp_path / "pasted.yaml").write_text(Path(PPO).read_text() + text)
    config, _ = load_expr_config(["--config", str(tmp_path / "pasted.yaml"), *KEYS, *keys], type(ppo_config()))
    layout = make_layout(config)
    assert rows(output)["1"][0] == ", ".join(f"{'+'.join(one.roles)} {one.num_ranks}" for one in layout)
    assert len(layout) == 2 and "share" in text
    assert config.workers is not None and config.workers.rollout.num == 2
    assert (layout[0].strategy, config.workers.restarts) == ("SPREAD", 5)


def test_servers_that_are_waited_for_and_ranks_that_help_nothing_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for number in (1, 2):
        config = ppo_config(f"workers.actor.ranks={number}")
        price = PRICE | {"advantages": Cost(1.0, 0.0)}
        runs += ["--costs", str(write_run(tmp_path / str(number), config, ppo(config), price).path)]
    assert main(["plan-core", PPO, "actor.path=/model", *runs]) == 0
    output = capsys.readouterr().out
    assert "That run waited for its servers" in output
    assert "More ranks made advantages no faster." in output


def test_grpo_has_a_graph_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--config", str(CONFIGS / "gsm8k_grpo_cpu.yaml"), "actor.path=/model", "workers={}"]
    argv += ["actor.proximal=recompute"]
    config, _ = load_expr_config(argv, GRPOConfig)
    names = ("actor_inf", "advantages", "actor_train")
    run = write_run(tmp_path / "run", config, grpo(config), {name: PRICE[name] for name in names})
    assert main(["plan-core", argv[1], *argv[2:], "--costs", str(run.path), "--devices", "2"]) == 0
    assert rows(capsys.readouterr().out)["1"][:2] == ["actor 2", "3.850"]


def test_runs_of_other_work_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", "workers={}", "gconfig.n_samples=4")
    assert main(["plan-core", PPO, *KEYS, "--costs", run]) == 2
    assert f"config's gconfig.n_samples, 8: got 4 in {run}." in capsys.readouterr().err
    assert main(["plan-core", PPO, *KEYS, "--costs", str(tmp_path)]) == 2
    assert f"costs must be a run folder with config.yaml: got none in {tmp_path}." in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "two"])
def test_devices_are_a_number(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan-core", PPO, "--costs", "run", "--devices", number])
    assert f"argument --devices: must be a whole number above 0: got {number}" in capsys.readouterr().err
