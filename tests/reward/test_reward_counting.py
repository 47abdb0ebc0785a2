import pytest

from arealite.reward.counting import clevr_count_70k_reward_fn


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("[5]", "5", 1.0),
        ("[5]", "[5]", 1.0),
        ("First [3], no: [ 5 ] objects.", 5, 1.0),
        ("[5.0]", "5", 1.0),
        ("5", "5", 0.0),
        ("[5] or [6]", "5", 0.0),
        ("[five]", "5", 0.0),
        ("", "5", 0.0),
    ],
)
def test_the_last_number_in_brackets_counts(completion: str, answer: object, reward: float) -> None:
    assert clevr_count_70k_reward_fn("", completion, [], [], answer) == reward
