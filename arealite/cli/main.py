"""The console script `arealite`: imports the module of the command, which adds its arguments and runs it.

Without a command, `key=value` arguments are those of `train`.
"""

import atexit
import gc
import sys
from collections.abc import Sequence
from importlib import import_module

from arealite import __version__
from arealite.api.errors import AReaLiteError, require_linux
from arealite.api.script import show_refusal
from arealite.utils.files import FileError
from arealite.utils.terminal import Parser, until_reader_leaves

COMMANDS = {
    "quickstart": "train a tiny model from scratch: SFT, then asynchronous GRPO, in minutes, on a CPU",
    "init": "write an experiment to change: script, config, reward, data, and a test",
    "train": "train a model on your data and reward, or start a ready-made trainer or one of your own",
    "check": "preflight: find what would make a run fail, before it starts",
    "check-loss": "try the properties that a loss of your own must have",
    "serve": "add an inference server to a running experiment, or serve a model on its own",
    "eval": "evaluate a model on a data set through servers that run already",
    "tinker": "serve the training API of the Tinker SDK, for scripts that use tinker or its cookbook",
    "tiny-model": "make a tiny model and tokenizer for tests and smoke runs",
    "replay": "repeat a training step of a run and compare the weights",
    "report": "write report.html for a run folder",
    "view": "show runs in a browser, also while they train: charts, and every trajectory token by token",
    "plan": "say whether a run fits, how fast it would be and which keys to change, before it starts",
    "calibrate": "measure what servers and trainer take on this device, for `plan --gpu FILE`",
    "simulate": "predict how fast a run would be and what decides it, by its rollout runtime in virtual time",
    "migrate": "rewrite a config of AReaLite v0.3 or AReaL as one of ours",
    "schema": "write the JSON schema of a config, by which editors complete and check YAML files",
    "ledger": "account for every prompt of a run: lost, repeated, dropped and why",
}
"""The commands in the order of --help; each has a module with `add_arguments(parser)` and `run(args)`."""
_TRAIN_OPTIONS = ("--config", "--dry-run", "--model", "--data", "--reward", "--sft")


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    atexit.register(gc.freeze)  # else Python searches all of torch for garbage at its end, for a second
    with until_reader_leaves():
        return _run(sys.argv[1:] if argv is None else argv)


def make_parser(words: Sequence[str]) -> Parser:
    """Return the parser; only the command that the words begin with is imported and has arguments."""
    parser = Parser(prog="arealite", description="Asynchronous reinforcement learning of language models.")
    parser.add_argument("--version", action="version", version=f"arealite {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if [name] == [*words[:1]]:
            module = import_module(f"arealite.cli.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _run(words: list[str]) -> int:
    if words and ("=" in words[0] or words[0] in _TRAIN_OPTIONS):
        words = ["train", *words]
    parser = make_parser(words)
    args, more = parser.parse_known_args(words)
    if "overrides" in args:
        args.overrides += more
    elif more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    try:
        require_linux()
        status: int = args.run(args)
    except (AReaLiteError, FileError) as error:
        show_refusal(error)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
