"""`arealite eval`: evaluates through servers that run already. This process becomes the example script."""

import os
import sys
from collections.abc import Sequence

from arealite.api.cli_args import EvalConfig, load_expr_config
from arealite.cli.trainers import examples_folder

_ANSWER_S = 30.0  # of a server that runs; the default is for one that loads its model


def evaluate(servers: Sequence[str], config: str | None, overrides: Sequence[str]) -> int:
    """Become the script; a config that it would refuse raises ConfigError."""
    script = examples_folder() / "arealite" / "evaluate.py"
    words = ["--config", config or str(script.parent / "configs" / "evaluate.yaml")]
    words += [] if config else [f"rollout.setup_timeout={_ANSWER_S}"]
    words += ["allocation_mode=''", f"rollout.server_addrs=[{','.join(servers)}]", *overrides]
    load_expr_config(words, EvalConfig)
    os.execv(sys.executable, [sys.executable, str(script), *words])
