from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from arealite.utils.secret import (
    SECRET_FILE,
    SECRET_VARIABLE,
    authorization,
    check_exposed,
    ensure_secret,
    is_authorized,
    is_loopback,
    secret_of_environment,
)


def test_a_run_keeps_its_secret_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert secret_of_environment() is None
    secret = ensure_secret(tmp_path)
    assert len(secret) == 64 and ensure_secret(tmp_path) == secret
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [tmp_path / SECRET_FILE]
    (tmp_path / "other").mkdir()
    assert ensure_secret(tmp_path / "other") != secret


def test_a_secret_from_outside_wins_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_secret(tmp_path)
    monkeypatch.setenv(SECRET_VARIABLE, "mine" * 4)
    assert ensure_secret(tmp_path) == "mine" * 4 == secret_of_environment()
    monkeypatch.setenv(SECRET_VARIABLE, "mine" * 4 + "\n")  # as a file with a secret holds it
    assert ensure_secret(tmp_path) == "mine" * 4 == secret_of_environment()
    monkeypatch.setenv(SECRET_VARIABLE, "")
    assert secret_of_environment() is None and ensure_secret(tmp_path) == "mine" * 4
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "mode", "owner", "rule"),
    [
        ("x" * 16, 0o640, os.geteuid(), "readable by its owner alone: got mode 0640"),
        ("x" * 16, 0o606, os.geteuid(), "readable by its owner alone: got mode 0606"),
        ("x" * 16, 0o600, os.geteuid() + 1, f"yours: got one of user {os.geteuid()}"),
        ("x" * 15, 0o600, os.geteuid(), "16 to 1024 characters, of printable ASCII: got 15"),
        ("\xe9" * 16, 0o600, os.geteuid(), "16 to 1024 characters, of printable ASCII: got 16"),
        ("x" * 16 + "\n" + "x" * 16, 0o600, os.geteuid(), "16 to 1024 characters, of printable ASCII: got 33"),
        ("", 0o600, os.geteuid(), "16 to 1024 characters, of printable ASCII: got 0"),
    ],
)
def test_a_secret_that_others_may_know_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, mode: int, owner: int, rule: str
) -> None:
    """Who may write to the folder may have planted it."""
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    path = tmp_path / SECRET_FILE
    path.write_text(f"{text}\n")
    path.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    with pytest.raises(
        ValueError, match=f"{path} must be {rule}. Remove it, for a new one, or set {SECRET_VARIABLE} if"
    ):
        ensure_secret(tmp_path)
    monkeypatch.setenv(SECRET_VARIABLE, "another secret that is mine")
    assert ensure_secret(tmp_path) == "another secret that is mine" == path.read_text().strip()
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(ValueError, match=f"{SECRET_VARIABLE} must be 16 to 1024 characters, of printable ASCII: got 5"):
        ensure_secret(tmp_path)


@pytest.mark.parametrize(
    "header", [None, "", "abc", "Bearer", "Bearer ab", "Bearer abcd", "bearer abc", "Bearer \udcff"]
)
def test_only_the_secret_authorizes(header: str | None) -> None:
    assert not is_authorized(header, "abc")
    assert is_authorized(authorization("abc")["Authorization"], "abc")
    assert authorization(None) == authorization("") == {}


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("gpu1", False)],
)
def test_who_listens_where_others_connect_has_a_secret(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
    check_exposed(host, "abc")
    if expected:
        check_exposed(host, None)
    else:
        with pytest.raises(ValueError, match=f"must have a secret: got --host {host} and none. Set {SECRET_VARIABLE}"):
            check_exposed(host, None)
