"""Names as keys of a Redis server, which ends leases by itself; `arealite[redis]` installs its client.

What must be one step (compare and renew, compare and delete) is a script that the server runs.
"""

from __future__ import annotations

import re
import time

from arealite.utils.name_resolve.store import DEADLINE_S, is_under

_RENEW = "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('pexpire', KEYS[1], ARGV[2]) or 0"
_DELETE = "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('del', KEYS[1]) or 0"
_AT_ONCE = 1000
"""Keys that the server looks at for one answer."""


class RedisStore:
    """See the module."""

    def __init__(self, host: str, port: int) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self.where = f"Redis at {host}:{port} (cluster.name_resolve.redis_addr)"
        self.failures: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        self._client = redis.Redis(
            host=host,
            port=port,
            decode_responses=True,
            socket_timeout=DEADLINE_S / 2,
            socket_connect_timeout=DEADLINE_S / 2,
            retry=Retry(NoBackoff(), 1),  # for connections that the server closed meanwhile
        )

    def put(self, key: str, text: str, ttl_s: float | None, replace: bool) -> bool:
        """See `Store`."""
        return bool(self._client.set(key, text, px=None if ttl_s is None else _ms(ttl_s), nx=not replace))

    def renew(self, key: str, text: str, ttl_s: float) -> bool:
        """See `Store`."""
        return bool(self._client.eval(_RENEW, 1, key, text, _ms(ttl_s)))

    def delete(self, key: str, text: str | None) -> bool:
        """See `Store`."""
        return bool(self._client.delete(key) if text is None else self._client.eval(_DELETE, 1, key, text))

    def get(self, key: str) -> str | None:
        """See `Store`."""
        text: str | None = self._client.get(key)
        return text

    def items(self, root: str) -> dict[str, str]:
        """See `Store`."""
        keys = self._keys(root)
        texts = self._client.mget(keys) if keys else []
        return {key: text for key, text in zip(keys, texts, strict=True) if text is not None}

    def clear(self, root: str) -> None:
        """See `Store`."""
        keys = self._keys(root)
        if keys:
            self._client.delete(*keys)

    def _keys(self, root: str) -> list[str]:
        pattern = re.sub(r"([][*?\\^-])", r"\\\1", root) + "*"
        deadline = time.monotonic() + DEADLINE_S
        keys: set[str] = set()
        for key in self._client.scan_iter(match=pattern, count=_AT_ONCE):
            if time.monotonic() > deadline:
                raise TimeoutError(f"its keys were not all listed after {DEADLINE_S:g} s")
            keys.add(key)
        return [key for key in keys if is_under(root, key)]


def _ms(ttl_s: float) -> int:
    return max(1, round(ttl_s * 1000))
