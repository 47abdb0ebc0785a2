import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.trainer.step_line import StepLine, compact

ROW = {
    "reward/mean": 0.4125, "policy/loss": -0.0031, "policy/approx_kl": 0.0,
    "rollout/completion_tokens": 312.4, "rollout/truncated_ratio": 0.0625, "policy/mismatch_kl": 4e-5,
    "staleness/mean": 1.3, "staleness/max": 3.0, "time/rollout_s": 18.21, "time/logprobs_s": 2.2, "time/update_s": 7.2,
    "perf/tokens_per_s": 21_345.0, "optim/lr": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.413, "0.413"), (-0.003, "-3.0e-3"), (1.234e-4, "1.2e-4"), (1e-12, "1.0e-12"), (12.34, "12.3"),
     (9.9996, "10.0"), (999.96, "1.0k"), (21_345, "21.3k"), (3.2e6, "3.2M"), (7e12, "7000.0G"), (math.nan, "nan"),
     (-math.inf, "-inf")],
)  # fmt: skip
def test_compact(value: float, text: str) -> None:
    assert compact(value) == text


@given(st.floats(1e-9, 1e12))
def test_compact_is_the_number_to_a_few_digits(value: float) -> None:
    text = compact(value)
    number = float(text.rstrip("kMG")) * {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1)
    assert number == pytest.approx(value, rel=0.051)


def test_the_line_and_its_order() -> None:
    line = StepLine(total_steps=200, staleness_bound=4, width=200)
    assert line.render(12, ROW | {"eval/accuracy": 0.5}) == (
        "step  12/200 | reward  0.412 | loss -0.003 | length 312.4 | truncated   6% | mismatch_kl 4.0e-5"
        " | staleness 1.3/4 | rollout 18.2s train  9.4s | processed 21.3k/s | eval  0.500"
    )


def test_a_last_evaluation_shows_only_what_it_has() -> None:
    line = StepLine(total_steps=200, staleness_bound=4, width=200)
    line.render(199, ROW)
    row = {"eval/accuracy": 0.5, "eval/reward": 0.8, "time/step_s": 1.0}
    assert line.render(200, row) == "step 200/200 | eval  0.500"
    row = {"eval/reward": -0.75, "time/step_s": 1.0}  # which is no accuracy
    assert line.render(200, row) == "step 200/200 | eval -0.750"


def test_what_a_run_never_has_takes_no_room() -> None:
    line = StepLine(total_steps=5, staleness_bound=None, width=200)
    assert line.render(3, {"sft/loss": 2.5, "time/train_s": 0.25}) == "step 3/5 | loss  2.500 | train  0.2s"


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_a_line_fits_the_terminal_and_stays_aligned(width: int) -> None:
    line = StepLine(total_steps=200, staleness_bound=4, width=width)
    lines = [line.render(step, row) for step, row in ((0, ROW | {"eval/accuracy": 0.5}), (99, ROW))]
    assert all(len(text) <= width and "reward" in text and "rollout" in text for text in lines)
    assert "eval" in lines[0] and ("mismatch_kl" in lines[0]) is False
    assert lines[0][12:].startswith(lines[1][12:])
