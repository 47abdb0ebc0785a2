"""Asynchronous PPO with a critic as a declared graph: the script of main_sync_ppo.py with another config.

python3 training/main_async_ppo.py [--config FILE.yaml] key=value ...
"""

import sys

from main_sync_ppo import main, master

from arealite.launcher.start import launched

if __name__ == "__main__":
    sys.exit(launched(__file__, main, check=master))
