"""`weights.jsonl` of a run folder: the fingerprint of the trainer's parameters as each version was published, and the
number of threads, as sums in another order have other last bits. Invariant: versions rise from line to line. A version
that is published again, because the run went back to a checkpoint or began anew, replaces its line and all later ones.
"""

from pathlib import Path

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.run_folder import RunFolder
from arealite.utils.files import keep_rows, read_jsonl, reading


def record_weights(config: InferenceEngineConfig, version: int, fingerprint: str, *, threads: int) -> None:
    """Write the line of a version; a run without a folder has no log."""
    if not config.fileroot:
        return
    path = RunFolder(config).weights_log
    path.parent.mkdir(parents=True, exist_ok=True)
    row = {"version": version, "fingerprint": fingerprint, "threads": threads}
    keep_rows(path, "version", before=version, then=[row])


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
