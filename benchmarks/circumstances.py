"""When, where and at which commit something was measured."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch


def circumstances() -> dict[str, str | int | float]:
    """Say where and when this was measured."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "machine": platform.machine(),
        "cores": os.cpu_count() or 0,
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
    }
