import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testing_completions import CASES

from arealite.reward import gsm8k_reward_fn


def reward(completion: str, answer: str) -> float:
    return gsm8k_reward_fn("Q", completion, [1], [2], answer=answer)


def asked(answer: str, *completions: str) -> list[tuple[str, str]]:
    return [(completion, answer) for completion in completions]


RIGHT = [
    *asked("18", "#### 18", "####18", "#### 18.", "#### 18!", "#### 18 apples", "#### 18kg", "#### The answer is 18."),
    *asked("18", "#### **18**", "**#### 18**", "#### *18*", "#### **$18** per day", "#### `18`", "#### __18__"),
    *asked("18", "#### (18)", '#### "18"', "####\n\n18", "#### 18\nThat is all, 19 would be wrong."),
    *asked("18", "#### 18<|im_end|>", "#### US$18", "#### $ 18", "#### 18$", "#### €18", "#### 18 USD", "#### Rs. 18"),
    *asked("18", "#### $18$", "#### \\$18", "#### \\(18\\)", "#### 1.8e1", "#### x = 18", "#### 3 * 6 = 18"),
    *asked("18", "#### 18 (6*3)", "#### => 18", "#### 18 (not 19)", "#### １８", "#### \\boxed{18}"),
    *asked("18", "So it is \\boxed{18}.", "So it is \\boxed{ 18 }", "\\boxed{\\text{The answer is } 18}"),
    *asked("18", "\\fbox{18}", "\\boxed{3} no, \\fbox{18}", "\\boxed {18}"),
    *asked("0.001", "\\boxed{1e-3}", "#### 1e-3"),
    *asked("18", "\\boxed{18\\text{ apples}}", "\\boxed{3} no, \\boxed{18}", "first #### 3, then #### 18"),
    *asked("18", "#### 3\n\\boxed{18}", "\\boxed{18}\n#### 19", "\\boxed{18}\n#### Step 2: check", "The answer is 18"),
    *asked("18", "The answer is 18.", "So the final answer is: **18**", "**Answer:** 18 apples", "**Answer**: $18"),
    *asked("18", "answer = 18", "The answer to the question of how many there are is\n\n18."),
    *asked("18", "The final answer is:\n\\[\n18\n\\]", "**The final answer is:**\n\n$$18$$"),
    *asked("18", "#### Step 1: Add 3\nso 18.\n#### Final Answer\n\n18"),
    *asked("18", "#### Step 1\n9*2\n#### 2. Check it\n18\nThe answer is 18.", "The answer is 17. Wait.\n#### 18"),
    *asked("18", "#### 17\nNo, the answer is 18.", "#### 18\n#### Notes", "#####\n18"),
    *asked("18", "#### The most he can earn is 18", "#### 18 2-litre bottles"),
    *asked("1800", "#### $1,800", "#### 1 800", "#### 1\u00a0800", "#### 1{,}800", "#### 1\\,800"),
    *asked("-5", "#### -5", "#### \u22125", "#### \u20135", "#### - 5", "#### -$5", "#### $-5", "#### Answer: -5"),
    *asked("5", "#### +5", "#### Therefore x > 3 so x = 5"),
    *asked("0.75", "#### 3/4", "#### .75", "#### 3 / 4 cup", "#### \\frac{3}{4}", "#### $\\dfrac{3}{4}$"),
    *asked("0.75", "#### \\frac34", "#### ¾", "\\boxed{\\frac{3}{4}}"),
    *asked("3/4", "#### 0.75", "#### 6/8"),
    *asked("1.5", "#### 1 1/2", "#### 1\\frac{1}{2}", "#### 1½"),
    *asked("50", "#### 50%", "#### 50 percent"),
    *asked("50%", "#### 50\\%", "#### 0.5"),
    ("3+7=10\n10+8=18\n#### 18", "She has 10+8=<<10+8=18>>18.\n#### 18"),
    ("#### 18.00", "#### 18"),
    ("#### 1,800", "#### 1,800"),
    ("#### 1\u202f234\u202f567", "1234567"),
    ("#### 1,234,567.50", "1234567.5"),
    ("#### -\\frac{3}{4}", "-0.75"),
    ("#### 50%", "0.5"),
    ("#### 1e3", "1000"),
    ("#### 0.1", "1/10"),
    ("#### 007", "7"),
]

WRONG = [
    *asked("18", "18 apples, but then 19.\n#### 19", "#### 18\n#### 19", "#### 18\n####", "18\n####", "#### \n \n"),
    *asked("18", "#### none, although 18 was close #### ", "18", "The answer is not 18", "The answer is 18 or 19"),
    *asked("18", "The answer is 18.\nNo, the answer is 19.", "There are 18.", "#### Step 18", "#### Step 5: x = 18"),
    *asked("18", "#### 18. Add them up", "**Step 1: Add 18**\n#### Step 1: Add 18", "\\boxed{19}\n#### 18", "### 18"),
    *asked("18", "", "\\boxed{18} and \\boxed{19}", "\\boxed{18", "\\boxed{}", "\\boxed", "\\boxed{18} then \\boxed{"),
    *asked("18", "#### 19 or 18", "#### 18 or 19", "#### 18, 19", "#### 18 19 20 21", "#### 18 to 20"),
    *asked("18", "#### between 18 and 20", "#### not 18", "#### The answer is not 18", "#### <18", "#### > 18"),
    *asked("18", "#### x >= 18", "#### $x \\leq 18$", "#### \\neq 18", "#### at least 18", "#### less than 18"),
    *asked("18", "#### no more than about 18", "#### x != 18", "#### 18 2", "#### 18 2.5", "#### 180", "#### 118"),
    *asked("18", "#### 1.8", "#### -18", "#### 18-19", "#### 18 - 2", "#### 18 + 1", "#### 18 = x + 1 = 19"),
    *asked("18", "#### x18", "#### eighteen"),
    *asked("12", "#### 1,2", "#### 12:30"),
    *asked("1", "#### 1,2", "#### 1e999999999"),
    *asked("6", "#### 6*3", "#### 6 * 3", "#### 6 x 3"),
    *asked("10", "#### 10^2", "#### 10^{2}"),
    *asked("0", "#### 1/0", "#### 0/0"),
    ("#### Step 2", "2"),
    ("#### 18", "-18"),
    ("#### 1,8000", "18000"),
    ("#### 1.2.3", "1.2"),
    ("#### 5²", "5"),
    ("#### 3/4/5", "0.75"),
    ("#### 50%", "5000"),
    ("#### 0.3333", "1/3"),
    ("#### " + "9" * 5000, "9"),
    ("#### 18", ""),
    ("#### 18", "no number"),
]


@pytest.mark.parametrize(("completion", "answer"), RIGHT)
def test_right_answers(completion: str, answer: str) -> None:
    assert reward(completion, answer) == 1.0


@pytest.mark.parametrize(("completion", "answer"), WRONG)
def test_wrong_answers(completion: str, answer: str) -> None:
    assert reward(completion, answer) == 0.0


@pytest.mark.parametrize(("answer", "expected", "completion"), [case[1:] for case in CASES])
def test_completions_in_the_style_of_chat_models(answer: str, expected: float, completion: str) -> None:
    assert reward(completion, answer) == expected


def test_percentages_compare_with_each_other_as_written() -> None:
    assert reward("#### 50%", "0.5%") == 0.0
    assert reward("#### 50%", "50 %") == 1.0


def test_numeric_answer_columns_are_understood() -> None:
    assert gsm8k_reward_fn("Q", "#### 18", [], [], answer=18, question="?") == 1.0  # type: ignore[arg-type]


@given(st.text() | st.text(alphabet="#0123456789.,/%-+*^=$\\{} \nebxfracoedt½−"), st.text(alphabet="0189.,/-%#e "))
def test_any_text_is_accepted(text: str, answer: str) -> None:
    assert reward(text, answer) in (0.0, 1.0)
    assert reward("#### " + text, answer) in (0.0, 1.0)
    assert reward("\\boxed{" + text + "}", answer) in (0.0, 1.0)


@given(st.integers(-(10**12), 10**12), st.booleans())
def test_integers_in_any_grouping(number: int, grouped: bool) -> None:
    assert reward(f"#### {number:,}" if grouped else f"#### {number}", str(number)) == 1.0
    assert reward(f"#### {number:,}", str(number + 1)) == 0.0


@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=999))
def test_fractions_are_exact(number) -> None:
    assert (
        reward(f"#### {number.numerator}/{number.denominator}", f"{number * 2}/2" if number == 0 else str(number))
        == 1.0
    )
    assert reward(f"\\boxed{{{number + 1}}}", str(number)) == 0.0


PIECES = (
    *("<", "not ", "9", "1,", "1 ", "1 1", "{", "\\boxed{", "\\frac{", "*a", "**", "x", " ", "$", "1/", "-", "####"),
    *("½", "=1", "e9", "answer is ", "answer\n", "answer ", "#### a\n", ": ", "\n"),
)


@pytest.mark.parametrize("piece", PIECES)
def test_long_texts_take_linear_time(piece: str) -> None:
    began = time.process_time()
    for text in (piece * 50_000, "1" + piece * 50_000 + "x"):
        reward("#### " + text, "18")
        reward("\\boxed{" + text + "}", "18")
    assert time.process_time() - began < 20.0  # in quadratic time each text takes longer


def test_importing_the_room_is_light() -> None:
    code = "import sys, arealite.reward.runner; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
