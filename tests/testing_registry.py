"""Registers test servers for a run as real ones do, in a folder, and changes their entries at will."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from arealite.api.cli_args import NameResolveConfig
from arealite.utils.name_resolve import make_repository
from arealite.utils.server_record import ServerRecord, servers_root

RUN = {"experiment_name": "exp", "trial_name": "t"}


class Registry:
    """The registry of one run."""

    def __init__(self, folder: Path, secret: str | None = None) -> None:
        self.config = NameResolveConfig(nfs_record_root=str(folder))
        self.secret = secret
        self.names = make_repository(**dataclasses.asdict(self.config))

    def put(self, name: str, address: str, state: str = "ready", **changes: Any) -> None:
        """Write the entry of a server, or write it anew."""
        record = {"backend": "lite", "node": "here", "pid": 1, "detail": "", "since": time.time(), **changes}
        key = f"{servers_root(RUN['experiment_name'], RUN['trial_name'])}/{name}"
        text = ServerRecord(address=address, state=state, **record).to_text(key, self.secret)  # type: ignore[arg-type]
        self.names.add(key, text, keepalive_ttl=60.0, replace=True)

    def drop(self, name: str) -> None:
        """Delete the entry of a server."""
        self.names.delete(f"{RUN['experiment_name']}/{RUN['trial_name']}/servers/{name}")
