"""`arealite tiny-model`: a model with random weights and a tokenizer, for tests and smoke runs."""

import argparse
from pathlib import Path

from arealite.api.errors import ConfigError
from arealite.cli.examples import quickstart_module


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, help="folder to write (Hugging Face format)")
    parser.add_argument("--corpus", help="text or jsonl file for the tokenizer; default: generated word problems")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random weights (default 1)")
    parser.add_argument("--vision", action="store_true", help="let it see images, of the Qwen2.5-VL type")
    parser.add_argument("--untied", action="store_true", help="give the output layer weights of its own")


def run(args: argparse.Namespace) -> int:
    """Write the model and print its folder."""
    if Path(args.out).is_dir() and any(Path(args.out).iterdir()):
        raise ConfigError(f"--out must be an empty or a new folder: got {args.out}, which holds files.")
    name = "tiny_vision_model" if args.vision else "tiny_model"
    write = getattr(quickstart_module(name), f"write_{name}")
    print(write(out=args.out, corpus=args.corpus, seed=args.seed, tie=not args.untied))
    return 0
