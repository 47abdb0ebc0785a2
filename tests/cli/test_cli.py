"""The console script, as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from arealite.cli.main import main

pytestmark = pytest.mark.xdist_group("launcher")


def arealite(*arguments: str, timeout: int = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "arealite.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_help_names_the_commands() -> None:
    shown = arealite("--help")
    assert shown.returncode == 0
    assert all(command in shown.stdout for command in ("quickstart", "tiny-model", "report"))
    assert arealite().returncode == 2


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("actor.lrr=1", "actor.lrr"),
        ("seed=x", "seed must be an integer: got 'x'"),
        ("actor.path=/m", "quickstart makes its own model"),
        ("sft_steps=0", "sft_steps must be a positive integer"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(override: str, told: str, tmp_path: Path) -> None:
    shown = arealite("quickstart", f"fileroot={tmp_path}", override)
    assert shown.returncode == 2 and "ConfigError" in shown.stderr and told in shown.stderr
    assert not list(tmp_path.iterdir())


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
    assert main(["tiny-model", "--out", str(tmp_path / "none"), "--corpus", str(tmp_path / "missing")]) == 2


def test_a_short_quickstart(tmp_path: Path) -> None:
    """Both phases run and leave what they promise; learning takes longer."""
    shown = arealite(
        *("quickstart", f"fileroot={tmp_path}", "trial_name=t", "sft_steps=10", "total_train_steps=2"),
        *("valid_dataset.max_rows=16", "train_dataset.batch_size=8"),
        timeout=240,
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    folder = tmp_path / "quickstart" / "t"
    assert shown.stdout.rstrip().endswith(str(folder / "report.html"))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() >= {
        *("steps", "accuracy_before", "accuracy_after", "answer_tokens_before", "answer_tokens_after"),
        *("staleness_max", "max_head_offpolicyness", "wall_s", "sft_s", "rl_s", "generated_tokens", "trained_tokens"),
    }
    assert summary["steps"] == 2 and summary["wall_s"] > summary["sft_s"] + summary["rl_s"]
    again = arealite("quickstart", f"fileroot={tmp_path}", "trial_name=t")
    assert again.returncode == 2 and "trial_name must be new" in again.stderr
