"""Skips what this machine can not run, lends the cases of `tests/engine`, and tells results on a GPU at once.

A GPU may be lent for minutes: a run that is cut off has told what it found, and why a test failed.
"""

import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

NEEDED = {"gpu": 1, "multi_gpu": 2}
"""CUDA devices by mark."""
_configs: list[pytest.Config] = []


def pytest_configure(config: pytest.Config) -> None:
    """End as after an interrupt when `timeout` ends the run: with the summary."""
    if torch.cuda.is_available() and not hasattr(config, "workerinput"):  # a worker of xdist has no terminal
        _configs.append(config)
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    found = torch.cuda.device_count()
    for mark, needed in NEEDED.items():
        if item.get_closest_marker(mark) is not None and found < needed:
            pytest.skip(f"needs {needed} CUDA devices: got {found}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.nodeid.startswith("tests/gpu/") or (report.passed and report.when != "call"):
        return
    for config in _configs:
        terminal: pytest.TerminalReporter = config.pluginmanager.getplugin("terminalreporter")
        name = report.nodeid.removeprefix("tests/gpu/")
        terminal.write_line(f"\n{report.outcome} {name}, {report.when} of {report.duration:.1f} s {report.capstdout}")
        if report.failed:
            terminal.write_line(report.longreprtext[-6000:])
