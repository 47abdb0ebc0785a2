"""What a backend of name resolve must do. Everything else (names, keepalive, waits) is in `repository`, once.

Invariant: a text is unique to the `add` that made it, so that "still that text" means "still that entry". An entry
whose time is over does not exist for anyone, whoever removes it.
"""

from __future__ import annotations

from typing import Protocol

DEADLINE_S = 10.0
"""Within which a backend answers or raises one of its `failures`."""


class Store(Protocol):
    """Texts by key, some of which end unless they are renewed. Its methods are called from several threads."""

    where: str
    """Kind, address and key of the configuration, for messages."""
    failures: tuple[type[Exception], ...]
    """What its methods raise if the backend is unreachable or refuses."""

    def put(self, key: str, text: str, ttl_s: float | None, replace: bool) -> bool:
        """Store a text, for `ttl_s` seconds or for good; False if there is one and it must not be replaced.

        May answer False about the very text it stored, if an answer was lost on the way.
        """

    def renew(self, key: str, text: str, ttl_s: float) -> bool:
        """Let an entry live `ttl_s` seconds from now; False if it is not that text any more."""

    def delete(self, key: str, text: str | None) -> bool:
        """Remove an entry, if it is that text (None: any); False if it is not."""

    def get(self, key: str) -> str | None:
        """Return the text of a key."""

    def items(self, root: str) -> dict[str, str]:
        """Return the texts of `root` and of all keys below it."""

    def clear(self, root: str) -> None:
        """Remove `root` and all keys below it."""


def is_under(root: str, key: str) -> bool:
    """Tell whether a key is `root` or below it."""
    return key == root or key.startswith(f"{root}/")
