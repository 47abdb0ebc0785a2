"""PPO with a critic as a declared graph, whose servers never wait for an update: the same script, another config.

python3 training/main_async_ppo.py [--config FILE.yaml] key=value ...
"""

import sys

from main_sync_ppo import main, master

from arealite.launcher.start import launched

if __name__ == "__main__":
    sys.exit(launched(__file__, main, check=master))
