import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from two_ranks import Reduce, on_two_ranks

from arealite.algorithms.objectives import token_weights

AGGREGATIONS = ("token_mean", "sequence_mean", "prompt_mean", "constant")
MASK, GROUPS = torch.ones(4, 5, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
rows = st.lists(st.tuples(st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 3)), min_size=1, max_size=8)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(rows=rows, is_first=st.lists(st.booleans(), min_size=8, max_size=8))
def test_weights_equal_their_definition_on_any_split_over_ranks(
    aggregation: str, rows: list[tuple[list[bool], int]], is_first: list[bool]
) -> None:
    answers = [(sum(mask), group) for mask, group in rows if any(mask)]  # the others are no part of any count
    num_groups = len({group for _, group in answers})
    expected = []
    for mask, group in rows:
        of_group = sum(length for length, other in answers if other == group)
        divisor = {
            "token_mean": sum(length for length, _ in answers),
            "sequence_mean": len(answers) * sum(mask),
            "prompt_mean": num_groups * of_group,
            "constant": len(answers) * 7.0,
        }[aggregation]
        expected.append([1 / divisor if trained else 0.0 for trained in mask])
    masks, groups = torch.tensor([mask for mask, _ in rows]), torch.tensor([group for _, group in rows])
    is_mine = torch.tensor(is_first[: len(rows)])

    def weights(rank: int, reduce: Reduce) -> torch.Tensor:
        mine = is_mine == (rank == 0)
        constant = {"aggregation": aggregation, "loss_constant": 7.0}
        return token_weights(masks[mine], groups[mine], 4, reduce=reduce, **constant)

    on_rank0, on_rank1 = on_two_ranks(weights)
    torch.testing.assert_close(on_rank0, torch.tensor(expected)[is_mine], rtol=1e-6, atol=0)
    torch.testing.assert_close(on_rank1, torch.tensor(expected)[~is_mine], rtol=1e-6, atol=0)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"aggregation must be one of token_mean, .*: got 'mean'"):
        token_weights(MASK, GROUPS, 2, aggregation="mean")
    for constant in (None, 0.0, -1.0):
        with pytest.raises(ValueError, match=f"loss_constant must be positive .*: got {constant}"):
            token_weights(MASK, GROUPS, 2, aggregation="constant", loss_constant=constant)
