"""`arealite ledger`, as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from testing_rollouts import edit_rows, write_rows

from arealite.api.io_struct import PromptId
from arealite.cli.main import main
from arealite.rollout.account.ledger import Ledger
from arealite.rollout.prompts import Prompt, SampleRecord
from arealite.rollout.staleness import StalenessAccount

ORDER = {"seed": 1, "dataset_size": 40, "batch_size": 40, "shuffle": False, "drop_last": True}


def make_run(folder: Path) -> None:
    """Of 40 prompts the 4 slowest fail, the others are trained."""
    account = StalenessAccount(batch_size=40, max_head_offpolicyness=0, max_concurrent=40)
    ledger = Ledger(str(folder / "ledger.sqlite"), account)
    prompts = [Prompt(PromptId(0, index)) for index in range(40)]
    ledger.issue(prompts, cursor={"epoch": 0, "position": 40, **ORDER})
    for number, prompt in enumerate(prompts, start=1):
        ledger.start(prompt, head_version=0)
        samples = [SampleRecord(0, 100 * number, number / 4, 0, "127.0.0.1:1")]
        if number > 36:
            ledger.drop(prompt, "failed", "reward_timeout", samples, number / 4)
        else:
            ledger.accept(prompt, samples, number / 4)
    ledger.train(prompts[:36], 0)
    ledger.note_checkpoint(0, ledger.flush())
    ledger.close()
    write_rows(folder / "rollouts" / "step_0", [{"prompt_id": str(prompt.prompt_id)} for prompt in prompts[:36]])


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_tables_of_a_clean_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    assert main(["ledger", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    lines = [" ".join(line.split()) for line in shown]
    assert max(len(line) for line in shown) <= 80
    assert "trained 36 90.0 % 36 66,600" in lines
    assert "failed: reward_timeout 4 10.0 % 4 15,400" in lines
    assert "0.25 .. 1 4 100.0 %" in lines and "9.25 .. 10 4 0.0 % reward_timeout 100.0" in lines
    assert "Trained share of the slowest minus the fastest: -100.0 ± 35.4 points, beyond two" in lines
    assert lines[-4:] == [
        "issued 40 = trained 36 + rejected 0 + failed 4 + pending 0",
        "provisional 0 of the trained (checkpoint of step 0)",
        "lost 0",
        "repeated 0",
    ]


def test_json_and_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    edit_rows(tmp_path / "rollouts" / "step_0", lambda rows: rows[1:])
    write_rows(tmp_path / "rollouts" / "step_1", [{"prompt_id": "0-5"}])
    assert main(["ledger", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    names = ("issued", "trained", "provisional", "rejected", "failed", "pending", "lost", "repeated", "adds_up")
    assert [found[name] for name in names] == [40, 36, 0, 0, 4, 0, 1, 1, True]
    assert (found["lost_ids"], found["repeated_ids"]) == (["0-0"], ["0-5"])
    assert found["states"] == {"failed_reward_timeout": 4, "trained": 36}
    assert [bias["measure"] for bias in found["bias"]] == ["latency_s", "tokens"]
    assert found["bias"][0]["difference"] == -1.0 and len(found["bias"][0]["parts"]) == 10
    assert main(["ledger", str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith("lost 1: 0-0\nrepeated 1: 0-5\n")


def test_folders_without_a_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", str(tmp_path)]) == 2
    assert "LedgerError: " in (error := capsys.readouterr().err) and "must exist" in error
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert main(["ledger", str(tmp_path)]) == 2
    assert "a ledger belongs to a run that samples" in (error := capsys.readouterr().err) and "(fine-tuning)" in error
