import pytest

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
        ("I do not know.", "7", 0.0),
        (r"\boxed{", "7", 0.0),
    ],
)
def test_formulas_are_compared_as_mathematics(completion: str, answer: str, expected: float) -> None:
    assert math_reward_fn("", completion, [], [], answer=answer) == expected


def test_an_answer_that_is_no_formula_is_told_and_not_a_zero() -> None:
    with pytest.raises(ValueError, match="the column answer must be a formula: got ''"):
        math_reward_fn("", r"\boxed{7}", [], [], answer="")
