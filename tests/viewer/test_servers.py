"""What each server sampled for the steps of a run."""

from pathlib import Path

from arealite.api.io_struct import PromptId
from arealite.rollout.account.ledger import Ledger
from arealite.rollout.prompts import Prompt, SampleRecord
from arealite.rollout.staleness import StalenessAccount
from arealite.viewer.servers import server_charts


def write_ledger(path: Path, steps: list[list[tuple[str, int, int]]]) -> Path:
    """Write a prompt per step with a sample per server, number of tokens and number of interrupts; and a failure."""
    ledger = Ledger(str(path), StalenessAccount(batch_size=1, max_head_offpolicyness=9, max_concurrent=99))
    ledger.rollback(0)
    prompts = [Prompt(PromptId(0, index)) for index in range(len(steps) + 1)]
    ledger.issue(prompts, cursor=None)
    for step, (prompt, samples) in enumerate(zip(prompts, steps)):
        ledger.start(prompt, 0)
        records = [SampleRecord(i, tokens, 1.0, cuts, name) for i, (name, tokens, cuts) in enumerate(samples)]
        ledger.accept(prompt, records, 1.0)
        ledger.train([prompt], step)
    ledger.start(prompts[-1], 0)
    ledger.drop(prompts[-1], "failed", "server", [SampleRecord(0, 99, 1.0, 9, "a")], 1.0)
    ledger.close()
    return path


def test_tokens_by_server_and_interrupts_of_each_step(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "l", [[("a", 5, 0), ("b", 7, 1), ("a", 1, 2)], [("b", 2, 0)]])
    servers, interrupts = server_charts(path)
    assert [(one["name"], one["x"], one["y"]) for one in servers["traces"]] == [
        ("b", [0, 1], [7, 2]),
        ("a", [0, 1], [6, 0]),
    ]
    assert [(one["x"], one["y"]) for one in interrupts["traces"]] == [([0, 1], [3, 0])]


def test_servers_without_a_colour_of_their_own_share_one(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "l", [[(f"server-{i}", 10 + i, 0) for i in range(9)]])
    (chart,) = server_charts(path)
    assert [one["name"] for one in chart["traces"]] == [*(f"server-{i}" for i in range(8, 2, -1)), "others"]
    assert chart["traces"][-1]["y"] == [10 + 11 + 12]


def test_one_server_that_was_never_interrupted_and_a_damaged_ledger_need_no_chart(tmp_path: Path) -> None:
    assert server_charts(write_ledger(tmp_path / "l", [[("a", 5, 0)]])) == []
    assert server_charts(tmp_path / "nothing") == []
    (tmp_path / "damaged").write_bytes(b"x" * 4096)
    assert server_charts(tmp_path / "damaged") == []
