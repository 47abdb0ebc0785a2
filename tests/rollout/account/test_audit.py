"""Folders made by hand, whose lost and repeated prompts and whose bias are known."""

from __future__ import annotations

import math
import random
import shutil
import sqlite3
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing_rollouts import write_rows

from arealite.api.errors import LedgerError
from arealite.api.io_struct import PromptId
from arealite.rollout.account.audit import EndedPrompt, audit, bias_of
from arealite.rollout.account.ledger import Ledger
from arealite.rollout.prompts import Prompt, SampleRecord
from arealite.rollout.staleness import StalenessAccount
from arealite.utils.data_order import passed_prompts
from arealite.utils.files import FileError

CURSOR = {
    "epoch": 1,
    "position": 2,
    "seed": 1,
    "dataset_size": 5,
    "batch_size": 2,
    "shuffle": False,
    "drop_last": True,
}
"""Passed: 0-0 .. 0-3 (the fifth fills no batch), 1-0, 1-1."""


def make_run(folder: Path, cursor: dict | None = CURSOR) -> Path:
    """Step 0 trains 0-0 and 0-1, step 1 trains 0-2; 0-3 fails, 1-0 is rejected, 1-1 is pending."""
    account = StalenessAccount(batch_size=2, max_head_offpolicyness=9, max_concurrent=9)
    ledger = Ledger(str(folder / "ledger.sqlite"), account)
    prompts = [Prompt(PromptId(*one)) for one in passed_prompts(CURSOR)]
    ledger.issue(prompts, cursor=cursor)
    for prompt in prompts[:5]:
        ledger.start(prompt, head_version=0)
    for tokens, prompt in zip((10, 20, 30), prompts):
        ledger.accept(prompt, [SampleRecord(0, tokens, 1.0, 0, "a:1"), SampleRecord(1, 4, 1.0, 2, "b:1")], 1.0)
    ledger.drop(prompts[3], "failed", "reward_timeout", latency_s=60.0)
    ledger.drop(prompts[4], "rejected", "filter", [SampleRecord(0, 7, 2.0, 1, "a:1")], 2.0)
    ledger.train(prompts[:2], 0)
    ledger.note_checkpoint(0, ledger.flush())
    ledger.train(prompts[2:3], 1)
    ledger.close()
    rollouts = folder / "rollouts"
    rollouts.mkdir()
    show(rollouts / "step_0", "0-0", "0-1")
    show(rollouts / "step_1", "0-2")
    show(rollouts / "eval_step_1", "0-0", "0-1")
    return folder


def show(path: Path, *names: str, samples: int = 2) -> None:
    write_rows(path, [{"prompt_id": name, "row": n, "input_ids": [1]} for name in names for n in range(samples)])


def test_a_clean_run(tmp_path: Path) -> None:
    found = audit(make_run(tmp_path))
    assert (found.issued, found.trained, found.provisional) == (6, 3, 1)
    assert (found.rejected, found.failed, found.pending) == (1, 1, 1)
    assert (found.lost, found.repeated, found.adds_up, found.is_clean) == (0, 0, True, True)
    assert found.states == {"trained": 3, "failed_reward_timeout": 1, "rejected_filter": 1, "issued": 1}
    assert found.samples == {
        "rejected_filter": {"samples": 1, "tokens": 7, "interrupts": 1},
        "trained": {"samples": 6, "tokens": 10 + 20 + 30 + 3 * 4, "interrupts": 6},
    }
    assert (found.checkpoint_step, found.cursor, found.notes) == (0, CURSOR, [])
    latency, tokens = found.bias
    assert [(part.low, part.settled) for part in latency.parts] == [(1, 1), (1, 1), (1, 1), (2, 1), (60, 1)]
    assert [part.low for part in tokens.parts] == [7, 7, 12, 17] and tokens.unmeasured == 1


def test_reading_leaves_no_trace(tmp_path: Path) -> None:
    make_run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    audit(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_the_ledger_calls_trained_must_be_shown(tmp_path: Path) -> None:
    make_run(tmp_path)
    shutil.rmtree(tmp_path / "rollouts" / "step_1")
    found = audit(tmp_path)
    assert (found.lost, found.lost_ids, found.is_clean) == (1, ["0-2"], False)
    assert found.notes == ["Lost prompts that are trained provisionally come back when the run is resumed."]


def test_what_a_killed_writer_leaves_shows_nothing(tmp_path: Path) -> None:
    make_run(tmp_path)
    whole = tmp_path / "rollouts" / "step_1" / "0.parquet"
    whole.rename(unfinished := whole.with_name(".0.parquet.unfinished"))
    unfinished.write_bytes(unfinished.read_bytes()[:-100])
    assert audit(tmp_path).lost_ids == ["0-2"]


def test_a_prompt_nobody_issued_is_lost(tmp_path: Path) -> None:
    make_run(tmp_path, CURSOR | {"position": 4})
    assert audit(tmp_path).lost_ids == ["1-2", "1-3"]


@pytest.mark.parametrize(("step", "names"), [("step_7", ["0-1"]), ("step_0", ["0-0", "0-1"])])
def test_a_prompt_of_two_steps_is_repeated_and_so_is_one_that_is_written_twice(
    tmp_path: Path, step: str, names: list[str]
) -> None:
    make_run(tmp_path)
    show(tmp_path / "rollouts" / step, *names)
    found = audit(tmp_path)
    assert (found.repeated, found.repeated_ids, found.lost, found.is_clean) == (len(names), names, 0, False)


def test_rows_that_went_missing_do_not_add_up(tmp_path: Path) -> None:
    make_run(tmp_path)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
        database.execute("DELETE FROM prompts WHERE ticket = 4")
    found = audit(tmp_path)
    assert (found.adds_up, found.is_clean, found.issued) == (False, False, 6)


@pytest.mark.parametrize(
    ("cursor", "told"),
    [(None, "the ledger holds no cursor of a dataloader"), ({"epoch": 1, "step": 3}, "cursor has no 'dataset_size'")],
)
def test_lost_is_unknown_without_a_cursor_to_compare_with(cursor: dict | None, told: str, tmp_path: Path) -> None:
    found = audit(make_run(tmp_path, cursor))
    assert found.lost is None and found.is_clean and told in found.notes[0]


def test_prompts_without_a_dataloader_are_counted_too(tmp_path: Path) -> None:
    ledger = Ledger(
        str(tmp_path / "ledger.sqlite"), StalenessAccount(batch_size=1, max_head_offpolicyness=0, max_concurrent=1)
    )
    prompt = Prompt(PromptId(-1, 0))
    ledger.issue([prompt], cursor=None)
    ledger.start(prompt, head_version=0)
    ledger.accept(prompt, [], 1.0)
    ledger.train([prompt], 0)
    ledger.close()
    (tmp_path / "rollouts").mkdir()
    show(tmp_path / "rollouts" / "step_0", "-1-0")
    show(tmp_path / "rollouts" / "step_1", "-1-0")
    assert audit(tmp_path).repeated_ids == ["-1-0"]


def test_what_can_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"ledger\.sqlite must exist: it does not\. Name the folder of a run"):
        audit(tmp_path)
    make_run(tmp_path)
    path = tmp_path / "rollouts" / "step_0" / "0.parquet"
    column = pq.read_metadata(path).row_group(0).column(0)
    assert column.path_in_schema == "row"
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 1] ^= 1  # of its only page
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"step_0/0\.parquet must be as its writer left it: got .* checksum"):
        audit(tmp_path)
    pq.write_table(pa.table({"sample": [0]}), path)
    with pytest.raises(FileError, match=r"step_0/0\.parquet must be .* no column prompt_id, row"):
        audit(tmp_path)
    (tmp_path / "ledger.sqlite").write_bytes(b"SQLite format 3\0" + random.Random(1).randbytes(9000))
    with pytest.raises(LedgerError, match="must be"):
        audit(tmp_path)


def test_bias_by_hand() -> None:
    """20 prompts in 10 parts of 2: the fastest are trained, of the slowest one is dropped."""
    settled = [EndedPrompt("trained", float(second), None) for second in range(1, 20)]
    settled.append(EndedPrompt("failed_timeout", 20.0, None))
    found = bias_of(settled, by="latency_s")
    assert [part.settled for part in found.parts] == [2] * 10
    assert (found.parts[0].low, found.parts[0].high, found.parts[-1].low) == (1, 2, 19)
    assert found.parts[-1].dropped_shares == {"failed_timeout": 0.5} and found.parts[0].dropped_shares == {}
    assert found.difference == -0.5 and found.standard_error == math.sqrt(0.75 * 0.25 * (1 / 2 + 1 / 2))
    lengths = bias_of(settled, by="tokens")
    assert (lengths.parts, lengths.unmeasured, lengths.difference) == ([], 20, None)


@given(
    st.lists(st.tuples(st.sampled_from(["trained", "failed_parse", "rejected_filter"]), st.none() | st.floats(0, 9)))
)
def test_each_prompt_is_in_one_part(found: list[tuple[str, float | None]]) -> None:
    bias = bias_of([EndedPrompt(outcome, latency_s, None) for outcome, latency_s in found], by="latency_s")
    assert sum(part.settled for part in bias.parts) + bias.unmeasured == len(found)
    assert all(part.settled > 0 for part in bias.parts) and len(bias.parts) <= 10
    assert all(one.high <= other.low for one, other in zip(bias.parts, bias.parts[1:]))
    num_trained = sum(part.trained_share * part.settled for part in bias.parts)
    assert num_trained == pytest.approx(sum(o == "trained" and s is not None for o, s in found))
    for part in bias.parts:
        assert part.trained_share + sum(part.dropped_shares.values()) == pytest.approx(1)
