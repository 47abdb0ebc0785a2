"""The example's training loop, one step at a time: after each step it waits until the suite allows the next one."""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from arealite.trainer.stats_logger import StatsLogger
from arealite.utils.files import write_atomically

ENTRY = Path(__file__).parents[2] / "examples" / "arealite" / "gsm8k_grpo.py"
_FOLDER = "AREALITE_CHAOS_RUN"
"""Variable with the folder of the run, `chaos.experiment.MARKER`: the trainer can't import that."""
_LOOK_S = 0.02


def allow(folder: Path, num_steps: int) -> None:
    """Let the run of this folder do its first `num_steps` steps."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(_file(folder), str(num_steps))


def main() -> None:
    """Become the example."""
    commit = StatsLogger.commit

    def commit_and_wait(logger: StatsLogger, step: int, *arguments: Any, **more: Any) -> Any:
        result = commit(logger, step, *arguments, **more)
        while int(_file(Path(os.environ[_FOLDER])).read_text()) <= step + 1:
            time.sleep(_LOOK_S)
        return result

    StatsLogger.commit = commit_and_wait  # type: ignore[method-assign]
    sys.argv[0] = str(ENTRY)
    runpy.run_path(str(ENTRY), run_name="__main__")


def _file(folder: Path) -> Path:
    return folder / "steps_allowed"


if __name__ == "__main__":
    main()
