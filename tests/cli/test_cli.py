"""The console script, as a user starts it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from arealite.api.cli_args import EvalConfig, load_expr_config
from arealite.cli.main import main
from arealite.launcher import local


def arealite(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "arealite.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_names_the_commands() -> None:
    shown = arealite("--help")
    assert shown.returncode == 0
    assert all(command in shown.stdout for command in ("quickstart", "tiny-model", "report"))
    assert arealite().returncode == 2


@pytest.mark.parametrize(("more", "timeout_s"), [([], 30), (["rollout.setup_timeout=5"], 5)])
def test_servers_that_run_already_are_not_waited_for_as_if_they_started(
    more: list[str], timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: commands.append(command))
    main(["eval", "--server", "127.0.0.1:9", "model.path=/m", "valid_dataset.path=rows.jsonl", *more])
    (command,) = commands
    config, _ = load_expr_config(command[2:], EvalConfig)
    assert config.rollout.setup_timeout == timeout_s and config.rollout.server_addrs == ["127.0.0.1:9"]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("actor.lrr=1", "actor.lrr"),
        ("seed=x", "seed must be a valid integer: got 'x'"),
        ("actor.path=/m", "quickstart makes its own model"),
        ("sft_steps=0", "sft_steps must be a positive integer"),
        ("trial_name=used", "trial_name must be new"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(
    override: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used = tmp_path / "quickstart" / "used" / "metrics.jsonl"
    used.parent.mkdir(parents=True)
    used.touch()
    before = sorted(tmp_path.rglob("*"))
    assert main(["quickstart", f"fileroot={tmp_path}", override]) == 2
    error = capsys.readouterr().err
    assert "ConfigError" in error and told in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_tiny_model_from_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"question": f"How many zebras? {i}", "answer": "zebras"}) + "\n" for i in range(50))
    )
    assert main(["tiny-model", "--out", str(tmp_path / "model"), "--corpus", str(corpus), "--seed", "3"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer(" zebras", add_special_tokens=False)["input_ids"]) == 1, "the corpus shaped the vocabulary"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() < 300_000
    assert main(["tiny-model", "--out", str(tmp_path / "model")]) == 2, "it might be a real one"
    assert "--out must be an empty or a new folder" in capsys.readouterr().err
    assert main(["tiny-model", "--out", str(tmp_path / "none"), "--corpus", str(tmp_path / "missing")]) == 2


def test_other_systems_are_told_what_to_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(["report", str(tmp_path)]) == local.main([str(tmp_path), "--config", "no.yaml"]) == 2
    assert capsys.readouterr().err.count("ConfigError: AReaLite must run on Linux: got darwin. Use WSL2") == 2
