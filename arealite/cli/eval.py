"""`arealite eval`: evaluates through servers that run already. This process becomes the example script."""

import argparse
import os
import sys

from arealite.api.cli_args import EvalConfig, load_expr_config
from arealite.cli.examples import examples_folder

_SETUP_TIMEOUT_S = 30.0  # the default is for a server that loads its model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "arealite eval --server HOST:PORT [--server ...] [--config FILE.yaml] rollout.backend=KIND key=value ..."
    )
    parser.description = (
        "Run examples/arealite/evaluate.py without a launcher: model.path, whose tokenizer is used, is what the "
        "servers have loaded, rollout.backend sglang (default), vllm or lite, valid_dataset.path the data."
    )
    parser.epilog = "AREALITE_SECRET must be the secret of servers that have one."
    parser.add_argument("--server", metavar="HOST:PORT", action="append", required=True, help="a server that runs")
    parser.add_argument("--config", metavar="FILE.yaml", help="default: examples/arealite/configs/evaluate.yaml")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="keys to change, e.g. gconfig.n_samples=32")


def run(args: argparse.Namespace) -> int:
    """Become the script; a config that it would refuse raises ConfigError."""
    script = examples_folder() / "arealite" / "evaluate.py"
    words = ["--config", args.config or str(script.parent / "configs" / "evaluate.yaml")]
    words += [] if args.config else [f"rollout.setup_timeout={_SETUP_TIMEOUT_S}"]
    words += ["allocation_mode=''", f"rollout.server_addrs=[{','.join(args.server)}]", *args.overrides]
    load_expr_config(words, EvalConfig)
    os.execv(sys.executable, [sys.executable, str(script), *words])
