"""Names as keys of etcd, by the JSON gateway that every etcd has (3.4 and later): no client library is needed.

A lease of etcd belongs to one entry; it lasts whole seconds, and at least two. Not supported yet: etcd with passwords
or TLS, and several addresses.
"""

from __future__ import annotations

import base64
import http.client
import json
import math
import urllib.error
import urllib.request
from typing import Any

from arealite.utils.name_resolve.store import DEADLINE_S, is_under


class EtcdStore:
    """See the module."""

    failures: tuple[type[Exception], ...] = (OSError, http.client.HTTPException, ValueError, KeyError)

    def __init__(self, host: str, port: int) -> None:
        self.where = f"etcd at {host}:{port} (cluster.name_resolve.etcd3_addr)"
        self._url = f"http://{host}:{port}/v3"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def put(self, key: str, text: str, ttl_s: float | None, replace: bool) -> bool:
        """See `Store`."""
        body = {"key": _encoded(key), "value": _encoded(text)}
        if ttl_s is not None:
            body["lease"] = self._post("lease/grant", {"TTL": math.ceil(ttl_s)})["ID"]
        is_absent = {"key": body["key"], "target": "VERSION", "result": "EQUAL", "version": 0}
        return self._do_if([] if replace else [is_absent], [{"request_put": body}])

    def renew(self, key: str, text: str, ttl_s: float) -> bool:
        """See `Store`."""
        entries = self._post("kv/range", {"key": _encoded(key)}).get("kvs", [])
        if not entries or entries[0].get("value") != _encoded(text):
            return False
        answer = self._post("lease/keepalive", {"ID": entries[0]["lease"]})
        return int(answer["result"].get("TTL", 0)) > 0

    def delete(self, key: str, text: str | None) -> bool:
        """See `Store`."""
        target = {"target": "VERSION", "result": "GREATER", "version": 0}
        if text is not None:
            target = {"target": "VALUE", "result": "EQUAL", "value": _encoded(text)}
        return self._do_if([{"key": _encoded(key), **target}], [{"request_delete_range": {"key": _encoded(key)}}])

    def get(self, key: str) -> str | None:
        """See `Store`."""
        entries = self._post("kv/range", {"key": _encoded(key)}).get("kvs", [])
        return _decoded(entries[0]["value"]) if entries else None

    def items(self, root: str) -> dict[str, str]:
        """See `Store`."""
        answer = self._post("kv/range", {"key": _encoded(root), "range_end": _encoded(f"{root}0")})  # 0 follows /
        texts = {_decoded(entry["key"]): _decoded(entry["value"]) for entry in answer.get("kvs", [])}
        return {key: text for key, text in texts.items() if is_under(root, key)}

    def clear(self, root: str) -> None:
        """See `Store`."""
        below = {"key": _encoded(f"{root}/"), "range_end": _encoded(f"{root}0")}
        self._do_if([], [{"request_delete_range": part} for part in ({"key": _encoded(root)}, below)])

    def _do_if(self, conditions: list[dict[str, Any]], operations: list[dict[str, Any]]) -> bool:
        answer = self._post("kv/txn", {"compare": conditions, "success": operations})
        return bool(answer.get("succeeded", False))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask etcd; DEADLINE_S is for two questions, the most that a method asks."""
        request = urllib.request.Request(
            f"{self._url}/{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        try:
            with self._opener.open(request, timeout=DEADLINE_S / 2) as reply:
                answer: dict[str, Any] = json.load(reply)
        except urllib.error.HTTPError as error:
            raise OSError(f"HTTP {error.code}: {error.read().decode(errors='replace').strip()}") from error
        return answer


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode()
