import pytest
import torch
import torch.distributed as dist

from arealite.utils import distributed


@pytest.fixture
def group() -> None:
    distributed.join_default_group(60)
    yield
    distributed.leave_default_group()


def test_the_last_engine_out_destroys_the_group() -> None:
    distributed.join_default_group(60)
    distributed.join_default_group(60)
    assert dist.get_world_size() == 1
    distributed.leave_default_group()
    assert dist.is_initialized()
    distributed.leave_default_group()
    assert not dist.is_initialized()


def test_a_group_of_someone_else_is_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    distributed.join_default_group(60)
    distributed.leave_default_group()
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_numbers_keep_their_precision(group: None) -> None:
    assert distributed.all_reduce_numbers([2**53 - 1, 0.1]) == [2**53 - 1, 0.1]


def test_reduction_leaves_its_argument(group: None) -> None:
    values = torch.tensor([1.0, 2.0])
    reduced = distributed.all_reduce(values, dist.ReduceOp.MAX)
    reduced.zero_()
    assert values.tolist() == [1.0, 2.0]


def test_an_error_of_this_rank_is_raised_as_it_is(group: None) -> None:
    distributed.raise_on_every_rank(None)
    with pytest.raises(KeyError, match="missing"):
        distributed.raise_on_every_rank(KeyError("missing"))
