"""The console script `arealite`: parses, calls. Each command imports its own machinery, so that --help is quick.

Without a command, `key=value` arguments are those of `train`.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from arealite.api.errors import AReaLiteError, ConfigError, require_linux
from arealite.api.script import show_refusal
from arealite.cli.parser import make_parser
from arealite.cli.trainers import examples_folder
from arealite.utils.files import FileError
from arealite.utils.terminal import until_reader_leaves


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    with until_reader_leaves():
        return _run(sys.argv[1:] if argv is None else argv)


def _run(words: list[str]) -> int:
    if words and ("=" in words[0] or words[0] in ("--config", "--dry-run", "--model", "--data", "--reward", "--sft")):
        words = ["train", *words]
    parser = make_parser()
    args, more = parser.parse_known_args(words)
    if "overrides" in args:
        args.overrides += more
    elif more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    try:
        require_linux()
        match args.command:
            case "train":
                from arealite.cli.own_data import Own
                from arealite.cli.train import train

                own = Own(args.model, args.data, args.reward, args.sft)
                return train(
                    args.overrides, config=args.config, is_dry_run=args.dry_run, own=own, save_as=args.save_config
                )
            case "init":
                from arealite.cli.init import init

                return init(args.folder, args.template)
            case "quickstart":
                return int(_example("quickstart").quickstart(args.overrides))
            case "tiny-model":
                if Path(args.out).is_dir() and any(Path(args.out).iterdir()):
                    raise ConfigError(f"--out must be an empty or a new folder: got {args.out}, which holds files.")
                write = _example("tiny_model").write_tiny_model
                if args.vision:
                    write = _example("tiny_vision_model").write_tiny_vision_model
                print(write(out=args.out, corpus=args.corpus, seed=args.seed, tie=not args.untied))
            case "check":
                from arealite.cli.check.check import check

                return check(args.entry, args.arguments)
            case "check-loss":
                from arealite.cli.check_loss import check_loss

                return check_loss(args.function, args.kind, is_strict=args.strict)
            case "serve":
                from arealite.cli.serve import serve

                return serve(args)
            case "eval":
                from arealite.cli.evaluate import evaluate

                return evaluate(args.server, args.config, args.overrides)
            case "replay":
                from arealite.cli.replay import replay

                return replay(args.run_folder, args.step)
            case "ledger":
                from arealite.cli.ledger import show_ledger

                return show_ledger(args.run_folder, as_json=args.json)
            case "plan-core":
                from arealite.cli.plan_core.plan_core import plan_core

                return plan_core(args.config, args.overrides, args.costs, args.devices)
            case "migrate":
                from arealite.cli.migrate import migrate

                return migrate(args.config, out=args.out)
            case "schema":
                from arealite.cli.schema import write_schema

                return write_schema(args.kind, args.out)
            case "devices":
                from arealite.cli.devices import devices

                return devices(args.config, args.overrides, of_ray=args.ray)
            case "report":
                from arealite.viewer.report import write_report

                print(write_report(args.run_folder))
            case "view":
                from arealite.cli.view import view

                return view(args.folder, port=args.port)
    except (AReaLiteError, FileError) as error:
        show_refusal(error)
        return 2
    return 0


def _example(name: str) -> ModuleType:
    """Import a program of the quickstart."""
    sys.path.insert(0, str(examples_folder() / "quickstart"))
    return import_module(name)


if __name__ == "__main__":
    sys.exit(main())
