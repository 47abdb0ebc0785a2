"""What a worker makes of the calls that it gets, without Ray around it."""

import pytest

pytest.importorskip("ray")
from arealite.core.worker import Call, Worker


class Engine:
    """Counts itself."""

    num_made = 0

    def __init__(self) -> None:
        type(self).num_made += 1

    def count(self) -> int:
        return self.num_made


def test_a_role_whose_engine_is_made_once_more_has_the_new_one() -> None:
    worker = Worker.__new__(Worker)
    worker._engines = {}
    make = Call("actor.make", "actor", Engine, makes=True)
    engines = []
    for _ in range(2):
        assert worker._do(make, (), []).value is None
        engines.append(worker._engines["actor"])
    assert engines[0] is not engines[1] and worker._do(Call("actor.count", "actor", "count"), (), []).value == 2
