"""`arealite migrate` on files of AReaLite v0.3 and AReaL."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.cli.main import main

ORIGINALS = Path(__file__).parents[1] / "api" / "originals"


def migrated(folder: Path, text: str, *, status: int = 0) -> tuple[dict[str, Any], str]:
    """Rewrite a config; return its keys and what is said about them."""
    old, new, said = folder / "old.yaml", folder / "new.yaml", io.StringIO()
    old.write_text(text)
    with new.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(said):
        assert main(["migrate", str(old)]) == status
    return yaml.safe_load(new.read_text()), said.getvalue()


def loaded(folder: Path) -> GRPOConfig:
    return load_expr_config(["--config", str(folder / "new.yaml")], GRPOConfig)[0]


@pytest.mark.parametrize(
    ("name", "servers", "baseline", "upper"), [("v03", 12, "none", 5.0), ("2026", 4, "group_mean", None)]
)
def test_published_files_keep_their_run(
    tmp_path: Path, name: str, servers: int, baseline: str, upper: float | None
) -> None:
    _, said = migrated(tmp_path, (ORIGINALS / f"{name}.yaml").read_text())
    config, actor = loaded(tmp_path), loaded(tmp_path).actor
    assert (config.allocation_mode, config.train_dataset.path) == (f"sglang.d{servers}p1t1+d4p1t1", "openai/gsm8k")
    found = (actor.baseline, actor.proximal, actor.correction.upper, actor.adv_norm)
    assert found == (baseline, "recompute", upper, True)
    for key in ("pin_memory", "num_workers", "enable_rollout_tracing", "name_resolve"):
        assert f"{key} has no effect: " in said, key


def test_moved_dropped_and_unknown_keys(tmp_path: Path) -> None:
    old = """\
experiment_name: e
trial_name: t
n_nodes: 2
cluster: {fileroot: /tmp/runs, name_resolve: {type: nfs, token: hidden}}
actor: {path: m, lr: 1e-5, eps_clip: 0.4, ppo_n_minibatches: 1}
train_dataset: {path: "${oc.env:DATA,gsm8k}", batch_size: 8}
rollout: {enable_rollout_tracing: true}
"""
    keys, said = migrated(tmp_path, old)
    lines = said.splitlines()
    assert len(lines) == 10
    assert keys["cluster"] == {"fileroot": "/tmp/runs", "n_nodes": 2}
    assert "n_nodes is now cluster.n_nodes=2. Rename it." in lines
    assert keys["actor"]["optimizer"] == {"lr": 1e-5, "eps": 1e-5}
    assert "actor.optimizer.eps=1e-05 is written out: it was the default." in lines
    assert keys["train_dataset"]["path"] == "${oc.env:DATA,gsm8k}"
    assert (keys["actor"]["baseline"], keys["actor"]["adv_norm"]) == ("none", True)
    assert any(line.startswith("rollout.enable_rollout_tracing has no effect: ") for line in lines)
    assert "hidden" not in said and "name_resolve" not in keys["cluster"]
    assert loaded(tmp_path).actor.baseline == "none"
    keys, said = migrated(tmp_path, f"{old}mine: {{a: 1}}\n", status=1)
    assert keys["mine"] == {"a": 1}, "a config class of the user's may have it"
    assert "to decide: mine must be a key of GRPOConfig: got it. Remove it; --help lists all keys" in said


def test_one_of_ours_stays_as_it_is(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "examples/arealite/configs"
    for name in ("gsm8k_grpo_cpu.yaml", "gsm8k_sft_cpu.yaml", "gsm8k_ppo_cpu.yaml"):
        text = (folder / name).read_text().replace("???", "m")
        keys, _ = migrated(tmp_path, text)
        assert keys == yaml.safe_load(text), name


def test_values_that_do_not_load_are_left_to_decide(tmp_path: Path) -> None:
    text = "experiment_name: e\ntrial_name: t\nactor: {path: m, optimizer: {lr: fast}}\ntrain_dataset: {path: d}"
    _, said = migrated(tmp_path, text, status=1)
    assert "to decide: actor.optimizer.lr must be" in said


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("orchestrator: {}", "the config must be of AReaLite v0.3 or AReaL, with a block actor or model: got orchestr"),
        ("a: [", "F must"),
        ("[1]", "F must"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.yaml"
    old.write_text(text)
    assert main(["migrate", str(old)]) == 2
    assert f"ConfigError: {error}" in capsys.readouterr().err.replace(str(old), "F")
