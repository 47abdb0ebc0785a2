"""Runs a command again each time a signal has ended it, as an init system would.

python -m chaos.respawn COMMAND...
"""

from __future__ import annotations

import subprocess
import sys


def main(command: list[str]) -> int:
    """Run the command until it ends by itself."""
    while (status := subprocess.run(command, check=False).returncode) < 0:
        print(f"ended by signal {-status}, started again", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
