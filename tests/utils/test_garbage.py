import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from arealite.utils import garbage
from arealite.utils.garbage import QuietCollector


class Loop:
    """Garbage that only the collector can find."""

    num_alive = 0

    def __init__(self) -> None:
        self.me = self
        Loop.num_alive += 1

    def __del__(self) -> None:
        Loop.num_alive -= 1


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_old_garbage_is_collected_at_most_once_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = QuietCollector()
    Loop()
    collector.collect()
    assert Loop.num_alive == 1, "a minute has not passed"
    monkeypatch.setattr(garbage, "_PERIOD_S", 0.0)
    collector.collect()
    assert Loop.num_alive == 0


def test_no_full_collection_happens_by_itself() -> None:
    QuietCollector()
    before = gc.get_stats()[2]["collections"]
    kept = [[index] for index in range(3_000_000)]  # more than the default takes to look at everything
    assert gc.get_stats()[2]["collections"] == before and len(kept) == 3_000_000


def test_a_process_of_ours_looks_for_no_garbage_among_modules() -> None:
    program = (
        "import arealite, atexit, gc\n"
        "from arealite.utils.garbage import skip_last_collection\n"
        "print(gc.get_threshold()[0])\n"
        "skip_last_collection()\n"
        "atexit._run_exitfuncs()\n"
        "print(len(gc.get_objects()) < 100 < gc.get_freeze_count())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["10000", "True"]
