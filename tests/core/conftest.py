"""What the tests of Core have measured, as the last line of a run: `RESULT {json}`."""

import json
from collections.abc import Callable
from typing import Any

import pytest

_results: dict[str, Any] = {}


@pytest.fixture(scope="session")
def measured() -> Callable[..., None]:
    """Return what notes a test's facts: counts and lists add up, other values stand for themselves."""

    def note(**facts: Any) -> None:
        for name, value in facts.items():
            adds_up = isinstance(value, int | list) and name in _results
            _results[name] = _results[name] + value if adds_up else value

    return note


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _results:
        _results["failed"] = session.testsfailed


def pytest_unconfigure() -> None:
    if _results:
        print(f"RESULT {json.dumps(_results)}", flush=True)
