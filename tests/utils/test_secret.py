from __future__ import annotations

import json
import stat
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from arealite.utils.environment import SECRET_VARIABLE
from arealite.utils.secret import (
    SECRET_FILE,
    authorization,
    check_exposed,
    ensure_secret,
    is_authorized,
    is_loopback,
    secret_of_environment,
    sign,
    verify,
)
from arealite.utils.server_record import ServerRecord, servers_root

RECORD = ServerRecord("10.0.0.1:80", "lite", "node1", 7, "ready", "", 12.5)
KEY = "e/t/servers/server-0"


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
    monkeypatch.setenv(SECRET_VARIABLE, "mine")
    assert ensure_secret(tmp_path) == "mine" == secret_of_environment()
    monkeypatch.setenv(SECRET_VARIABLE, "")
    assert secret_of_environment() is None and ensure_secret(tmp_path) == "mine"
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600


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


def test_a_record_holds_for_its_own_entry_and_as_it_was_signed() -> None:
    text = RECORD.to_text(KEY, "abc")
    assert ServerRecord.read(KEY, text, "abc") == RECORD
    assert json.loads(text)["address"] == "10.0.0.1:80", "plain to everybody"
    moved = replace(RECORD, address="10.6.6.6:80").to_text(KEY, "abc")
    forged = json.dumps(json.loads(text) | {"address": "10.6.6.6:80"})
    for key, bad, secret in [
        (KEY, forged, "abc"),
        (KEY, RECORD.to_text(KEY, None), "abc"),
        (KEY, RECORD.to_text(KEY, "other"), "abc"),
        ("e/other/servers/server-0", text, "abc"),
        (KEY, json.dumps(json.loads(moved) | {"signature": json.loads(text)["signature"]}), "abc"),
    ]:
        with pytest.raises(ValueError, match="must be signed with the secret of the run"):
            ServerRecord.read(key, bad, secret)


@pytest.mark.parametrize("text", ["", "no json", "[1]", "7", "null", '"text"'])
def test_what_is_no_record_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=f"the entry {KEY} must be a JSON object"):
        verify(KEY, text, "abc")


def test_without_a_secret_anything_of_the_right_form_goes() -> None:
    assert ServerRecord.read(KEY, RECORD.to_text(KEY, None), None) == RECORD
    assert ServerRecord.read(KEY, RECORD.to_text(KEY, "abc"), None) == RECORD
    with pytest.raises(ValueError, match="must be the record of a server"):
        ServerRecord.read(KEY, sign(KEY, asdict(RECORD) | {"more": 1}, None), None)
    assert servers_root("e", "t") == "e/t/servers"
