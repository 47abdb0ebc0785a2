"""What the tests of Core have measured, as the last line of a run: `RESULT {json}`."""

import json
from collections.abc import Callable
from typing import Any

import pytest

_results: dict[str, Any] = {}
_MARK = "measured: "


@pytest.fixture
def measured(record_property: Callable[[str, Any], None]) -> Callable[..., None]:
    """Return what notes a test's facts: counts and lists add up, other values stand for themselves."""

    def note(**facts: Any) -> None:
        for name, value in facts.items():
            record_property(_MARK + name, value)

    return note


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Also of tests in other processes: their reports bring what they measured."""
    for mark, value in report.user_properties if report.when == "teardown" else ():
        if mark.startswith(_MARK):
            name = mark.removeprefix(_MARK)
            adds_up = isinstance(value, int | list) and name in _results
            _results[name] = _results[name] + value if adds_up else value


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _results:
        _results["failed"] = session.testsfailed


def pytest_unconfigure(config: pytest.Config) -> None:
    if _results and not hasattr(config, "workerinput"):
        print(f"RESULT {json.dumps(_results)}", flush=True)
