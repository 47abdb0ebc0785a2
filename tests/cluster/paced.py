"""The example's training loop, one step at a time: after each step it waits until the suite allows the next one."""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from arealite.trainer.stats_logger import StatsLogger

ENTRY = Path(__file__).parents[2] / "examples" / "arealite" / "gsm8k_grpo.py"
ALLOWED = "AREALITE_TESTS_STEPS_ALLOWED"
"""Variable with the path of a file that says how many steps may be done."""
_LOOK_S = 0.02


def main() -> None:
    """Become the example."""
    commit = StatsLogger.commit

    def commit_and_wait(logger: StatsLogger, step: int, *arguments: Any, **more: Any) -> Any:
        result = commit(logger, step, *arguments, **more)
        while int(Path(os.environ[ALLOWED]).read_text()) <= step + 1:
            time.sleep(_LOOK_S)
        return result

    StatsLogger.commit = commit_and_wait  # type: ignore[method-assign]
    sys.argv[0] = str(ENTRY)
    runpy.run_path(str(ENTRY), run_name="__main__")


if __name__ == "__main__":
    main()
