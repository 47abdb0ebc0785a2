"""`arealite tinker`: serve the API that the Tinker SDK speaks, over a trainer with LoRA and inference servers."""

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

from arealite.api.errors import ConfigError
from arealite.cli.examples import examples_folder
from arealite.launcher.start import start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve the training API of the Tinker SDK for one base model. Clients are told by two variables, "
        "TINKER_BASE_URL and TINKER_API_KEY, which the run folder's tinker.env sets; scripts that use tinker or "
        "tinker-cookbook run unchanged. docs/ecosystem.md says what is implemented."
    )
    parser.epilog = "exit status: that of `python3 -m arealite.launcher.local`"
    parser.add_argument("--model", metavar="M", required=True, help="folder or hub id of the base model")
    parser.add_argument("--port", type=int, help="port to listen on, 0 is any (default: the config's, 8790)")
    parser.add_argument("--lora-rank", type=int, help="highest rank of an adapter (default: the config's, 32)")
    parser.add_argument("--config", metavar="FILE.yaml", help="default: the example's, for a CPU")
    parser.add_argument("--dry-run", action="store_true", help="print what would run where, and start nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the config to change")


def run(args: argparse.Namespace) -> int:
    """Start the server by the launcher, and return its exit status."""
    if find_spec("tinker") is None:
        raise ConfigError("tinker must be installed: it is not. Run `pip install 'arealite[tinker]'`.")
    config = args.config or str(examples_folder() / "arealite/configs/tinker.yaml")
    options = {"actor.lora.rank": args.lora_rank, "agent.online.port": args.port}
    keys = [f"{key}={value}" for key, value in options.items() if value is not None]
    keys = [f"actor.path={json.dumps(args.model)}", *keys, *args.overrides]
    script = Path(__file__).parents[1] / "tinker" / "serve.py"
    return start(script, config, [*(["--dry-run"] if args.dry_run else []), *keys])
