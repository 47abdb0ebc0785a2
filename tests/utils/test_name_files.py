"""Names in files: against a model, and what NFS and killed processes do to them."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from arealite.utils.name_resolve.file_store import CLAIM_S, LEFTOVER_S, FileStore
from arealite.utils.name_resolve.store import is_under

KEYS = st.sampled_from(["a", "a/b", "a/b/c", "a/bc", "a:b", "a%2Fb", "é"])


def age(folder: Path, seconds: float) -> None:
    """Let time pass on the file server."""
    for path in folder.iterdir():
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


class FilesBehaveLikeADict(RuleBasedStateMachine):
    """The model: text and remaining seconds by key."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.store = FileStore(Path(self.folder.name))
        self.model: dict[str, tuple[str, float]] = {}

    def living(self) -> dict[str, str]:
        return {key: text for key, (text, left) in self.model.items() if left > 0}

    @rule(key=KEYS, ttl=st.sampled_from([None, 100.0, 300.0]), replace=st.booleans())
    def put(self, key: str, ttl: float | None, replace: bool) -> None:
        text = f"{uuid.uuid4().hex} \nvalue"
        is_put = replace or key not in self.living()
        assert self.store.put(key, text, ttl, replace) == is_put
        if is_put:
            self.model[key] = text, float("inf") if ttl is None else ttl

    @rule(key=KEYS, is_ours=st.booleans())
    def renew(self, key: str, is_ours: bool) -> None:
        text, left = self.model.get(key, ("none", 0.0))
        assert self.store.renew(key, text if is_ours else "other", 100.0) == (is_ours and left > 0)
        if is_ours and 0 < left <= 100:
            self.model[key] = text, 100.0
        elif is_ours and 100 < left < 1000:
            self.model[key] = text, 300.0

    @rule(key=KEYS, which=st.sampled_from(["any", "ours", "other"]))
    def delete(self, key: str, which: str) -> None:
        text = self.living().get(key)
        given = {"any": None, "ours": text or "none", "other": "other"}[which]
        is_deleted = text is not None and which != "other"
        assert self.store.delete(key, given) == is_deleted
        if is_deleted:
            del self.model[key]

    @rule(root=KEYS)
    def clear(self, root: str) -> None:
        self.store.clear(root)
        self.model = {key: entry for key, entry in self.model.items() if not is_under(root, key)}

    @rule(seconds=st.sampled_from([90.0, 150.0]))
    def pass_time(self, seconds: float) -> None:
        if self.store._folder.exists():
            age(self.store._folder, seconds)
        self.model = {key: (text, left - seconds) for key, (text, left) in self.model.items()}

    @rule(root=KEYS)
    def look(self, root: str) -> None:
        expected = {key: text for key, text in self.living().items() if is_under(root, key)}
        assert self.store.items(root) == expected

    @invariant()
    def each_key_has_its_text(self) -> None:
        living = self.living()
        for key in ("a", "a/b", "a:b"):
            assert self.store.get(key) == living.get(key)

    def teardown(self) -> None:
        self.folder.cleanup()


TestFilesBehaveLikeADict = FilesBehaveLikeADict.TestCase
TestFilesBehaveLikeADict.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=30)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path)


def test_leases_are_measured_by_the_file_servers_clock_alone(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    store.put("a", "text", 100.0, False)
    assert store.get("a") == "text"
    age(store._folder, 99.0)
    assert store.items("a") == {"a": "text"}
    assert store.renew("a", "text", 100.0)
    age(store._folder, 99.0)
    assert store.get("a") == "text"
    age(store._folder, 2.0)
    assert store.get("a") is None
    assert not store.renew("a", "text", 100.0), "a lease that ended is not renewed, though the file is still there"


def test_whoever_looks_removes_what_has_ended_and_what_killed_processes_left(store: FileStore) -> None:
    store.put("a", "ended", 1.0, False)
    store.put("b", "stays", 1000.0, False)
    (store._folder / ".draft-killed").write_text("")
    (store._folder / ".claim-killed").mkdir()
    age(store._folder, LEFTOVER_S + 1)
    (store._folder / ".draft-fresh").write_text("")
    (store._folder / ".claim-fresh").mkdir()
    store.items("a")
    assert sorted(path.name for path in store._folder.iterdir()) == [".claim-fresh", ".draft-fresh", "b"]


def test_the_claim_of_a_process_that_died_is_taken_over(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", "text", None, False)
    with monkeypatch.context() as dying:
        dying.setattr(Path, "rmdir", lambda path: None)
        store.renew("a", "text", 100.0)
    assert len(list(store._folder.glob(".claim-*"))) == 1
    threading.Timer(0.2, age, [store._folder, CLAIM_S + 1]).start()
    began = time.monotonic()
    assert store.put("a", "next", None, True)
    assert 0.2 <= time.monotonic() - began < 5
    assert [path.name for path in store._folder.iterdir()] == ["a"]


def test_a_stale_file_handle_is_opened_again(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", "text", None, False)
    stale = [OSError(errno.ESTALE, "Stale file handle")] * 3
    really_open = Path.open

    def open_stale(path: Path, *args: Any, **kwargs: Any) -> IO[Any]:
        if path.name == "a" and stale:
            raise stale.pop()
        return really_open(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_stale)
    assert store.get("a") == "text"
    assert stale == []


def test_an_entry_that_is_replaced_all_the_time_is_never_missing_or_torn(store: FileStore) -> None:
    texts = [letter * 100_000 for letter in "xyz"]
    store.put("a", texts[0], None, False)
    is_over = threading.Event()

    def replace() -> None:
        while not is_over.is_set():
            for text in texts:
                store.put("a", text, None, True)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        until, seen = time.monotonic() + 1.5, set()
        while time.monotonic() < until:
            text = store.items("a")["a"]
            assert text in texts
            seen.add(text)
    finally:
        is_over.set()
        thread.join(120)
    assert seen == set(texts)


TAKE_ENDED = """
import json, sys, time
from pathlib import Path
from arealite.utils.name_resolve.file_store import FileStore
store = FileStore(Path(sys.argv[1]))
print("here", flush=True)
sys.stdin.readline()
won = [key for key in map(str, range(60)) if store.put(key, f"{sys.argv[2]} {key}", 1000.0, False)]
print(json.dumps(won))
"""


def test_of_processes_that_find_a_lease_ended_one_takes_the_name(store: FileStore, tmp_path: Path) -> None:
    for key in map(str, range(60)):
        store.put(key, f"ended {key}", 1.0, False)
    age(store._folder, 2.0)
    command = [sys.executable, "-c", TAKE_ENDED, str(tmp_path)]
    racers = [
        subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    try:
        for racer in racers:
            assert racer.stdout is not None and racer.stdout.readline() == "here\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        won = [json.loads(racer.communicate(timeout=120)[0]) for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()
    assert sorted(key for keys in won for key in keys) == sorted(map(str, range(60)))
    assert all(store.get(key) == f"{rank} {key}" for rank, keys in enumerate(won) for key in keys)


def test_a_name_must_fit_in_a_file_name(store: FileStore) -> None:
    with pytest.raises(ValueError, match="must fit in 255 bytes of a file name: got x/xxx"):
        store.put("x/" + "x" * 254, "text", None, False)
