import pytest
from math_verify import verify

from arealite.reward.math import math_reward_fn


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"So it is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"So it is \boxed{\frac{1}{2}}.", r"$\frac{2}{4}$", 1.0),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        (r"\boxed{[0, 1)}", "[0,1)", 1.0),
        (r"\boxed{\sqrt{8}}", r"Thus $2\sqrt{2}$, i.e. \boxed{2\sqrt{2}}", 1.0),
        (r"\boxed{\frac{1}{3}}", "0.5", 0.0),
        (r"\boxed{(0, 1)}", "[0,1]", 0.0),
        (r"\boxed{1}\boxed{2}", "2", 1.0),
        (r"\boxed{2}, no: \boxed{1}", "2", 0.0),
        (r"\fbox{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{1e-3}", "0.001", 1.0),
        (r"\boxed{0.0015}", "1.5e-3", 1.0),
        (r"\boxed{2e-3}", "2 e - 3", 1.0),
        (r"\boxed{3}", 3, 1.0),
        (r"\boxed{\frac{1}{8}}", 0.125, 1.0),
        (r"\boxed{1}", 1e-5, 0.0),
        (r"\boxed{10^{-5}}", 1e-5, 1.0),
        ("So $x = 4$.", "4", 1.0),
        ("I do not know.", "7", 0.0),
        (r"\boxed{", "7", 0.0),
    ],
)
def test_formulas_are_compared_as_mathematics(completion: str, answer: object, expected: float) -> None:
    assert math_reward_fn("", completion, [], [], answer=answer) == expected


def test_an_answer_that_is_no_formula_is_told_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="the column answer must be a formula: got ''"):
        math_reward_fn("", r"\boxed{7}", [], [], answer="")


def test_a_comparison_that_never_ends_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[object] = []

    def counted(*formulas: object, timeout_seconds: int) -> bool:
        compared.append(formulas)
        return bool(verify(*formulas, timeout_seconds=timeout_seconds))

    monkeypatch.setattr("arealite.reward.math.verify", counted)
    monkeypatch.setattr("arealite.reward.math._COMPARISON_S", 1)
    for text in ("First", "Second"):
        assert math_reward_fn("", text + r" \boxed{9^{9^{9^{9}}}}", [], [], answer="7") == 0.0
    assert len(compared) == 1
