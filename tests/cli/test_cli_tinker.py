"""`arealite tinker`: options are keys; those that are not given leave a file's."""

from __future__ import annotations

from typing import Any

import pytest

from arealite.cli import main, tinker


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ([], ['actor.path="m"']),
        (["--lora-rank", "8", "--port", "0", "seed=2"], ["actor.lora.rank=8", "agent.online.port=0", "seed=2"]),
    ],
)
def test_options_that_are_not_given_leave_the_files(
    options: list[str], keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(tinker, "start", lambda *words: started.append(words) or 0)
    assert main.main(["tinker", "--model", "m", "--config", "own.yaml", *options]) == 0
    ((script, config, words),) = started
    assert (script.name, config) == ("serve.py", "own.yaml")
    assert words == ['actor.path="m"', *(key for key in keys if "path" not in key)]
