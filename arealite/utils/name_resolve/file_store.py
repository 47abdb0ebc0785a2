"""Names as files in one folder that every machine sees, also by NFS.

An entry is the file of its key: its lifetime in seconds, then its text. It is written elsewhere, then linked or
renamed, so that nobody sees half of one. Its lease began at its modification time, which is compared with that of a
file we have just touched: both are the file server's, and no other clock is asked. All entries lie in one folder
because an NFS client believes its copy of a folder for up to a minute, unless it changes the folder itself, which that
touched file does; opening a file likewise asks the server for its present state.

Invariant: whoever changes or removes an entry holds its claim, a folder named after its text, and has seen that the
entry is the same as when he decided. A claim lasts for a few system calls; one whose holder died is taken over.
A file system that hangs can't be given up on: calls take as long as it does.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from arealite.utils.name_resolve.store import DEADLINE_S, is_under

CLAIM_S = 5.0
"""Age at which a claim is taken over."""
LEFTOVER_S = 60.0
"""Age at which files of processes that were killed are removed."""
DRAFT, CLAIM = ".draft-", ".claim-"
LONGEST_NAME = 255
"""Bytes of a file name."""


@dataclass(frozen=True)
class _Found:
    text: str
    ends: float
    """By the file server's clock; infinite without a lease."""


class FileStore:
    """See the module; `root` is `cluster.name_resolve.nfs_record_root`."""

    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, root: Path) -> None:
        self._folder = root / ".names"
        self.where = f"the folder {self._folder} (cluster.name_resolve.nfs_record_root)"

    def put(self, key: str, text: str, ttl_s: float | None, replace: bool) -> bool:
        """See `Store`."""
        path = self._path(key)
        lifetime = float("inf") if ttl_s is None else ttl_s
        with self._draft(f"{lifetime!r}\n{text}") as draft:

            def take_over(path: Path) -> None:
                os.utime(draft)
                os.rename(draft, path)

            for _ in self._looks():
                os.utime(draft)
                with contextlib.suppress(FileExistsError):
                    os.link(draft, path)
                    return True
                if self._change(path, take_over, lambda found, now: replace or found.ends <= now):
                    return True
                if not replace:
                    return False
        raise AssertionError("looks never end")

    def renew(self, key: str, text: str, ttl_s: float) -> bool:
        """See `Store`."""
        return self._change(self._path(key), os.utime, lambda found, now: found.text == text and found.ends > now)

    def delete(self, key: str, text: str | None) -> bool:
        """See `Store`."""
        return self._change(
            self._path(key), os.unlink, lambda found, now: text in (None, found.text) and found.ends > now
        )

    def get(self, key: str) -> str | None:
        """See `Store`."""
        now, found = self._now(), _read(self._path(key))
        return found.text if found is not None and found.ends > now else None

    def items(self, root: str) -> dict[str, str]:
        """See `Store`. Whoever looks removes what has ended."""
        now, texts = self._now(), {}
        for path in self._folder.iterdir():
            key = _key(path)
            if path.name.startswith((DRAFT, CLAIM)):
                _sweep(path, now)
            elif is_under(root, key) and (found := _read(path)) is not None:
                if found.ends > now:
                    texts[key] = found.text
                else:
                    with self._claim(path, found, now) as is_unchanged:
                        if is_unchanged:
                            path.unlink()
        return texts

    def clear(self, root: str) -> None:
        """See `Store`."""
        for key in self.items(root):
            self._change(self._path(key), os.unlink, lambda found, now: True)

    def _path(self, key: str) -> Path:
        name = urllib.parse.quote(key, safe="/").replace("/", ":")
        if len(name) > LONGEST_NAME:
            raise ValueError(f"a name must fit in {LONGEST_NAME} bytes of a file name: got {key}. Shorten trial_name.")
        return self._folder / name

    def _change(self, path: Path, change: Callable[[Path], None], is_wanted: Callable[[_Found, float], bool]) -> bool:
        """Change an entry if that is wanted of its present state; False if it is not, or there is none."""
        for now in self._looks():
            found = _read(path)
            if found is None or not is_wanted(found, now):
                return False
            with self._claim(path, found, now) as is_unchanged:
                if is_unchanged:
                    change(path)
                    return True
        raise AssertionError("looks never end")

    @contextlib.contextmanager
    def _claim(self, path: Path, found: _Found, now: float) -> Iterator[bool]:
        """Keep others from changing an entry; False if one of them is about to, or has."""
        claim = self._folder / f"{CLAIM}{hashlib.sha256(found.text.encode()).hexdigest()[:32]}"
        try:
            claim.mkdir()
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                if claim.stat().st_mtime < now - CLAIM_S:
                    claim.rmdir()
            yield False
            return
        try:
            yield _read(path) == found
        finally:
            with contextlib.suppress(FileNotFoundError):
                claim.rmdir()

    def _looks(self) -> Iterator[float]:
        """Yield the file server's time, again and again; TimeoutError in the end."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            yield self._now()
            time.sleep(0.005)
        raise TimeoutError(f"other processes kept changing the same name for {DEADLINE_S:g} s")

    def _now(self) -> float:
        """Return the file server's time, and change the folder (see the module)."""
        with self._draft("") as probe:
            os.utime(probe)
            return probe.stat().st_mtime

    @contextlib.contextmanager
    def _draft(self, text: str) -> Iterator[Path]:
        """Write a file that is no entry yet, and will be gone."""
        path = self._folder / f"{DRAFT}{uuid.uuid4().hex}"
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("wb") as file:
                if text:
                    file.write(text.encode())
                    file.flush()
                    os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)


def _key(path: Path) -> str:
    return urllib.parse.unquote(path.name.replace(":", "/"))


def _read(path: Path) -> _Found | None:
    """Read an entry as the file server has it now."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            with path.open("rb") as file:
                lifetime, _, text = file.read().decode().partition("\n")
                return _Found(text, os.fstat(file.fileno()).st_mtime + float(lifetime))
        except FileNotFoundError:
            return None
        except OSError as error:  # ESTALE: another machine replaced the file between our look and our opening it
            if error.errno != errno.ESTALE or time.monotonic() > deadline:
                raise


def _sweep(path: Path, now: float) -> None:
    """Remove a draft or claim whose process was killed."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_mtime < now - LEFTOVER_S:
            (path.rmdir if path.is_dir() else path.unlink)()
