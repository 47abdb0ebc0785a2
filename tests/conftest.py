"""What all tests share: hypothesis's profiles, a sane SIGINT, and a table of what tests cost.

Modules shared by tests lie beside this file, which puts their folder on the path.
"""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No example may fail for being slow: a test that passes on a quiet machine must pass on a busy one.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", untimed, derandomize=True, database=None, max_examples=50)
settings.register_profile("explore", untimed, max_examples=1000, print_blob=True)
settings.load_profile("fixed")  # `make test-explore` passes --hypothesis-profile explore

# torch looks up the name of every peer that it connects to, which takes the resolver 5 s if its packet is lost.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# OpenMP's threads spin while they wait, a third of the CPU time of a small run with two of them. Read by what we start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What data sets leave for later runs is theirs. pytest-xdist's workers and what tests start share one folder.
if "HF_DATASETS_CACHE" not in os.environ:
    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="arealite-tests-datasets-")
    atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)

# A shell that starts pytest in the background ignores SIGINT, and what a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_costs = Counter[str]()
_counted = [0.0]


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of the children it has waited for."""
    forks = sys.modules.get("testing_forks")
    return sum(os.times()[:4]) + (forks.cpu_s() if forks else 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the quickstart's tiny model with random weights."""
    from testing_quickstart import write_tiny_model  # it imports torch

    return write_tiny_model(out=tmp_path_factory.mktemp("model"), corpus=None, seed=1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--short", action="store_true", help="leave out the tests that are marked long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests if asked to, and begin with the groups, which share what is expensive: no worker may be left
    alone with one at the end."""
    if config.getoption("--short"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import and collect without the garbage collector, which never has to look at modules and tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    _counted[0] = _cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the CPU seconds since the last report: the first and the last user of a shared fixture pay for it."""
    report = yield
    now = _cpu_s()
    report.user_properties.append(("cpu_s", now - _counted[0]))
    _counted[0] = now
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _costs[report.nodeid] += sum(value for name, value in report.user_properties if name == "cpu_s")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the most expensive tests by CPU time, which hardly depends on what else the machine does."""
    if len(_costs) > 1:
        terminalreporter.section(f"{sum(_costs.values()):.0f} CPU seconds in {len(_costs)} tests")
        for test, seconds in _costs.most_common(20):
            terminalreporter.line(f"{seconds:6.1f}  {test}")
