"""`arealite plan` of configs for devices that nobody has here."""

import json
import re
from pathlib import Path

import pytest
from testing_models import write_qwen3
from testing_plans import SECONDS, ppo_config, write_run
from testing_simulated import write_simulated

from arealite.cli.main import main
from arealite.core.experiments import ppo

CONFIGS = Path(__file__).parents[2] / "examples" / "arealite" / "configs"
GRPO = str(CONFIGS / "gsm8k_grpo.yaml")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The config of a model of 8 billion parameters."""
    return write_qwen3(tmp_path_factory.mktemp("model"))


def plan(capsys: pytest.CaptureFixture[str], *words: str, config: str = GRPO) -> tuple[int, str]:
    status = main(["plan", config, *words])
    return status, capsys.readouterr().out


@pytest.mark.parametrize("mode", ["sglang.d12p1t1+d4p1t1", "sglang.d96p1t1+d32p1t1"])
def test_the_documents_clusters(mode: str, qwen3: str, capsys: pytest.CaptureFixture[str]) -> None:
    nodes, per_node = (4, 4) if mode.startswith("sglang.d12") else (16, 8)
    words = (f"allocation_mode={mode}", f"cluster.n_nodes={nodes}", f"cluster.n_gpus_per_node={per_node}")
    status, shown = plan(capsys, "--gpu", "h100", f"actor.path={qwen3}", *words)
    lines = shown.splitlines()
    assert status == 0 and len(lines) <= 40
    assert lines[0].endswith(f", 8,191 million parameters: {mode} on h100")
    assert re.search(r"\n  AdamW moments +[\d.]+ +[\d.]+\n", shown) and "\nok: a trainer rank needs about" in shown
    assert re.search(
        r"\nA step of 1,142,\d+ tokens takes [\d.]+ s, [\d,]+ tokens/s.\nDecided by (servers|trainer): ", shown
    )
    seconds = [float(line.split()[1].replace(",", "")) for line in lines if line.startswith("sglang.")]
    assert len(seconds) == 4 and seconds[1:] == sorted(seconds[1:]) and seconds[1] < seconds[0]
    assert "\nFaster: allocation_mode=sglang.d" in shown and f"# {seconds[1]:.1f} s" in shown


def test_each_of_three_ways_to_fit_fits(qwen3: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpu", "h100", f"actor.path={qwen3}", "allocation_mode=sglang.d7+d1")
    status, shown = plan(capsys, *words)
    assert status == 1 and "problem: a trainer rank needs about 132.99 of 74.5 GiB" in shown
    ways = re.findall(r"(?:To fit:|       ) (\S.*?)   # [\d.]+ s", shown)
    assert len(ways) == 3
    for way in ways:
        status, shown = plan(capsys, *words, *way.split())
        assert status == 0 and "problem" not in shown, way


def test_a_change_that_is_proposed_does_what_it_says(qwen3: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpu", "h100", "--lengths", "8192,0.9,512", f"actor.path={qwen3}", "gconfig.max_new_tokens=31744")
    words += ("rollout.max_head_offpolicyness=0", "rollout.max_concurrent_rollouts=null")
    _, shown = plan(capsys, *words)
    ((change, seconds),) = re.findall(r"(rollout.max_head_offpolicyness=1)   # ([\d.,]+) s", shown)
    _, shown = plan(capsys, *words, change)
    assert f"tokens takes {seconds} s" in shown


def test_the_room_that_is_left_is_all_there_is(qwen3: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The longest sequence fits, and one 1 % longer does not."""
    words = ("--gpu", "h100", f"actor.path={qwen3}", "allocation_mode=sglang.d4+d4", "sglang.context_length=131072")
    words += ("gconfig.n_samples=2", "train_dataset.batch_size=2")
    _, shown = plan(capsys, *words)
    (tokens,) = re.findall(r"room for a sequence of ([\d,]+) tokens", shown)
    longest = int(tokens.replace(",", ""))
    for length, expected in ((longest, 0), (longest * 1.01, 1)):
        status, shown = plan(capsys, *words, f"gconfig.max_new_tokens={int(length) - 256}")
        assert status == expected, shown


def test_servers_on_the_trainers_devices_take_turns(qwen3: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, shown = plan(capsys, "--gpu", "h200", f"actor.path={qwen3}", "allocation_mode=sglang.d8|d8")
    ((whole, servers, trainer),) = re.findall(
        r"tokens takes ([\d.]+) s.*\n.*\nAlone they take: \w+ ([\d.]+) s, trainer ([\d.]+) s", shown
    )
    assert float(whole) == pytest.approx(float(servers) + float(trainer), abs=0.11)


def test_fine_tuning_has_a_trainer_alone(qwen3: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(CONFIGS / "gsm8k_sft.yaml")
    words = ("--lengths", "512,0", f"model.path={qwen3}", "model.gradient_checkpointing=true")
    status, shown = plan(capsys, "--gpu", "h200", *words, config=config)
    assert status == 0 and "Decided by trainer" in shown and "\nserver " not in shown


def test_lengths_of_a_run_and_simulated_splits(tmp_path: Path, qwen3: str, capsys: pytest.CaptureFixture[str]) -> None:
    run, _, _ = write_simulated(tmp_path)
    page = tmp_path / "page.html"
    words = ("--lengths", str(run.path), "--simulate", "1", "--page", str(page), "train_dataset.batch_size=8")
    status, shown = plan(capsys, "--gpu", "h100", f"actor.path={qwen3}", *words)
    assert status == 0 and f"Assumed: lengths of {run.path}; h100's profile" in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith("sglang.")]
    assert [len(row) for row in rows] == [5, 5, 4, 4], "the config and the best split are simulated"
    assert all(float(row[4]) == pytest.approx(float(row[1]), rel=0.35) for row in rows[:2])
    assert rows[1][0] in page.read_text()


def test_a_run_of_workers_is_compared_and_laid_out(
    tmp_path: Path, qwen3: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = (f"actor.path={qwen3}", "async_training=false", "workers={}")
    config = ppo_config(*keys)
    run = write_run(tmp_path / "run", config, ppo(config), SECONDS)
    held = {"perf/memory_gib_weights": 30.0, "perf/memory_gib_moments": 60.0, "perf/memory_gib_max": 200.0}
    rows = [json.loads(line) | held for line in run.metrics.read_text().splitlines()]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (*keys, "--measured", str(run.path), "--nodes", "2")
    status, shown = plan(capsys, *words, config=str(CONFIGS / "gsm8k_ppo_cpu.yaml"))
    assert status == 1 and "problem: the run needs" in shown, "8 billion parameters and a critic in 8 GB"
    assert re.search(r"\nparameters +30\.51\d+ +30\.0000 +1\.02\n", shown)
    assert re.search(r"\ngradients, activations +\S+ +110\.0000 ", shown), "what is left of the whole"
    assert "calls measured 15.000 s, predicted 15.000 s" in shown
    assert "\nworkers:\n  actor: {ranks: 2}\n  critic: {share: actor}\n" in shown


def test_what_a_plan_can_not_use_is_refused(qwen3: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words, problem in (
        ((), "--gpu must be given for a cluster with GPUs: got none."),
        (
            ("--gpu", "h100", "allocation_mode=sglang.d8"),
            "allocation_mode must name trainers: got sglang.d8p1t1. Add e.g. +d4.",
        ),
        (("--gpu", "h100", "--page", "page.html"), "--page must have something to draw: got no --simulate. Add it."),
        (
            ("--gpu", "h100", "actor.path=/not/there"),
            "path of a model must be an existing folder or a hub id: got '/not/there'",
        ),
        (("--gpu", "h100", "--lengths", "long"), "--lengths must be a run's folder or MEAN,SIGMA[,PROMPT]: got long."),
    ):
        assert main(["plan", GRPO, f"actor.path={qwen3}", *words]) == 2
        assert problem in capsys.readouterr().err
