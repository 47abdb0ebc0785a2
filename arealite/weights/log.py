"""`weights.jsonl` of a run folder: the fingerprint of the trainer's parameters as each version was published, and the
number of threads, as sums in another order have other last bits. Invariant: versions rise from line to line. A version
that is published again, because the run went back to a checkpoint or began anew, replaces its line and all later ones.
"""

import json
from pathlib import Path

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.run_folder import RunFolder
from arealite.utils.files import keep_rows, read_jsonl, reading, writing


def record_weights(config: InferenceEngineConfig, version: int, fingerprint: str, *, threads: int, rises: bool) -> None:
    """Write the line of a version; `rises` if this process wrote the last line, for an earlier one: the file, which has
    a line per step, is then not read."""
    path = RunFolder(config).weights_log
    if not rises:
        keep_rows(path, "version", before=version)
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"version": version, "fingerprint": fingerprint, "threads": threads}) + "\n")


def read_weights(folder: str | Path) -> dict[int, str]:
    """Return the fingerprint of every version of a run."""
    path = RunFolder(folder).weights_log
    with reading(path):
        return {row["version"]: row["fingerprint"] for row in read_jsonl(path)}


def threads_of(folder: str | Path, version: int) -> int:
    """Return the number of threads of the trainer that published a version."""
    path = RunFolder(folder).weights_log
    with reading(path):
        return next(int(row["threads"]) for row in read_jsonl(path) if row["version"] == version)
