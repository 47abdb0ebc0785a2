"""`arealite train`: the example scripts as ready-made trainers, started by the launcher that `mode` names.

`trainer.type` selects the script, and `trainer.<type>.KEY=value` is `KEY=value` of its config. The options --model,
--data, --reward and --sft are keys too; a key that is given beside its option wins. Without --config their file is
`own_grpo.yaml` or `own_sft.yaml` of the examples, on the devices of this node.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from arealite.api.config.data import GYM, OPENENV, VERIFIERS
from arealite.api.config.experiment import GYM_REWARD
from arealite.api.config.loader import as_given, masked
from arealite.api.config.run import load_run_config
from arealite.api.errors import ConfigError
from arealite.cli import own_trainer
from arealite.cli.examples import TRAINERS, examples_folder
from arealite.cli.own_trainer import TYPE
from arealite.launcher.start import start
from arealite.utils.devices import visible_gpus

_MODELS = {"grpo": "actor", "sft": "model"}
"""Trainers that the options are for, and the block of the model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.allow_abbrev = False  # --mode is not short for --model
    parser.usage = (
        "arealite train --model M --data D (--reward FILE.py:FUNCTION | --sft) [key=value ...]\n"
        "       arealite train --model M --env ENV [key=value ...]\n"
        "       arealite train trainer.type=TYPE [mode=local|ray|slurm] [--config FILE.yaml] [key=value ...]"
    )
    parser.description = (
        f"Start the example script of trainer.type ({', '.join(TRAINERS)}), or a class of your own "
        "(my_module:MyTrainer), by the launcher that mode names (default local). Keys are those of the script's "
        "config, with trainer.TYPE. before them or not; `python3 SCRIPT --help` lists them. --model, --data, --reward "
        "and --sft are such keys for GRPO and fine-tuning on your own data; the config that they make is printed."
    )
    parser.epilog = "exit status: that of `python3 -m arealite.launcher.MODE`, whose other options are taken too"
    parser.add_argument("--model", metavar="M", help="folder or hub id of the model to train")
    parser.add_argument(
        "--data",
        metavar="D",
        help=".jsonl, .json, .parquet or .csv file, folder, data set of the hub, or FILE.py:FUNCTION; columns are "
        "question and answer, or messages, unless train_dataset.prompt_key and answer_key name others",
    )
    parser.add_argument("--env", metavar="ENV", help="of verifiers, or openenv:URL, in place of --data and --reward")
    parser.add_argument(
        "--reward",
        metavar="FILE.py:FUNCTION[=WEIGHT]",
        action="append",
        default=[],
        help="function that scores a completion; several, with weights, are added",
    )
    parser.add_argument("--sft", action="store_true", help="learn the answers of the data (supervised fine-tuning)")
    parser.add_argument("--save-config", metavar="FILE.yaml", help="also write the config, to use it with --config")
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="default: the example's for GPUs; its _cpu.yaml with cluster.n_gpus_per_node=0, and with mode=local where "
        "there is no GPU; own_grpo.yaml or own_sft.yaml with --model and the like",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would run where, and start nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="trainer.type, mode, and keys to change")


def run(args: argparse.Namespace) -> int:
    """Start what `trainer.type` names by the launcher that `mode` names, and return the launcher's exit status."""
    if args.env is not None:
        if args.data or args.reward or args.sft:
            raise ConfigError("--env must stand in place of --data, --reward and --sft: got one of them. Remove it.")
        args.data = args.env if args.env.startswith(OPENENV) else f"{VERIFIERS}{args.env}"
    config, is_own_data = args.config, bool(args.model or args.data or args.reward or args.sft)
    kind, keys = _split([*(_trainer_type(args) if is_own_data else []), *args.overrides])
    if kind in TRAINERS:
        script = examples_folder() / "arealite" / f"{TRAINERS[kind]}.py"
        if _has_environment(args.data):
            script = examples_folder() / "agents" / "environment.py"
        before: list[str] = []
        if is_own_data:
            config, before = _own_data(args, kind, keys)
        elif config is None:
            config, before = _default_config(script, keys)
        keys = [*before, *keys]  # of two equal keys the last one counts
    else:
        script, keys = Path(own_trainer.__file__), [f"{TYPE}{kind}", *keys]
        if config is None:
            raise ConfigError("--config must be given for a trainer of your own: got no file. Add --config FILE.yaml.")
    print(f"{TYPE}{kind} is {script} with --config {config}", file=sys.stderr, flush=True)
    if is_own_data or args.save_config is not None:
        given = [key for key in keys if not key.startswith("-")]
        load_run_config(["--config", config, *given], script)  # a refused config is neither shown nor saved
        text = as_given(config, [key for key in given if not key.startswith(TYPE)])
        if is_own_data:
            shown = yaml.safe_dump(masked(text), sort_keys=False, allow_unicode=True)
            print(shown, file=sys.stderr, flush=True)
        if args.save_config is not None:
            _save(args.save_config, kind, text)
    return start(script, config, [*(["--dry-run"] if args.dry_run else []), *keys])


def _save(file: str, kind: str, text: str) -> None:
    """Write a config into a new file."""
    try:
        with open(file, "x", encoding="utf-8") as saved:
            saved.write(f"# arealite train {TYPE}{kind} --config {file}\n{text}")
    except OSError as error:
        raise ConfigError(f"--save-config must be a new file that can be written: got {error}. Correct it.") from error


def _split(words: Sequence[str]) -> tuple[str, list[str]]:
    """Separate `trainer.type` from the keys of the experiment, which lose their prefix."""
    kinds = [word.removeprefix(TYPE) for word in words if word.startswith(TYPE)]
    keys = [word for word in words if not word.startswith(TYPE)]
    kind = kinds[-1] if kinds else ""
    if kind not in TRAINERS and ":" not in kind:
        raise ConfigError(
            f"trainer.type must be {', '.join(TRAINERS)}, or a class of yours such as my_module:MyTrainer: "
            f"got {kind or 'nothing'}. Correct it, or give --model, --data and --reward or --sft."
        )
    prefix = f"trainer.{kind.rpartition(':')[2]}."
    return kind, [key.removeprefix(prefix) for key in keys]


def _default_config(script: Path, keys: Sequence[str]) -> tuple[str, list[str]]:
    """Return the example's config for GPUs or for a CPU, and where its data lies if that comes with the examples."""
    has_gpus = "cluster.n_gpus_per_node=0" not in keys and (not _is_local(keys) or len(visible_gpus()) > 0)
    file = script.parent / "configs" / f"{script.stem}{'' if has_gpus else '_cpu'}.yaml"
    blocks = yaml.safe_load(file.read_text(encoding="utf-8")).items()
    paths = {f"{name}.path": str(block.get("path")) for name, block in blocks if isinstance(block, dict)}
    above = script.parents[2]
    return str(file), [f"{key}={above / path}" for key, path in paths.items() if path.startswith("examples/")]


def _is_local(keys: Sequence[str]) -> bool:
    """Return whether the run stays on this node."""
    return [key for key in keys if key.startswith("mode=")][-1:] in ([], ["mode=local"])


def _trainer_type(args: argparse.Namespace) -> list[str]:
    """Return `trainer.type=` of the options, unless the keys name it."""
    named = {word.removeprefix(TYPE) for word in args.overrides if word.startswith(TYPE)}
    if named - _MODELS.keys() or (args.sft and "grpo" in named):
        raise ConfigError(
            "options --model, --data, --reward and --sft must go with trainer.type=grpo, or sft without a reward: "
            f"got {', '.join(sorted(named))}{' and --sft' * args.sft}. Give keys of the trainer in their place."
        )
    return [] if named else [f"{TYPE}{'sft' if args.sft else 'grpo'}"]


def _own_data(args: argparse.Namespace, kind: str, given: Sequence[str]) -> tuple[str, list[str]]:
    """Return the config's file and the keys of the options; `given` are keys beside them."""
    names = {key.partition("=")[0] for key in given}
    options: dict[str, tuple[str, str | dict[str, float] | None]] = {
        f"{_MODELS[kind]}.path": ("--model FOLDER", args.model),
        "train_dataset.path": ("--data FILE.jsonl", args.data),
    }
    if kind == "grpo" or args.reward:  # fine-tuning has no such key, as its config says
        option = "--reward FILE.py:FUNCTION, or --sft to learn the answers of the data"
        is_gym = (args.data or "").startswith(GYM) and "reward" not in names
        if not _has_environment(args.data):  # which gives the reward itself
            options["reward"] = (option, _reward(args.reward) or (GYM_REWARD if is_gym else ""))
    for key, (option, value) in options.items():
        if not (args.config or value or key in names):
            raise ConfigError(f"{option.split()[0]} must be given: got nothing. Add {option}.")
    keys = [f"{key}={json.dumps(value)}" for key, (_, value) in options.items() if value]  # never read as YAML
    if args.config is not None:
        return args.config, keys
    name = [f"experiment_name={_name(args.data)}-{kind}"] if args.data else []
    return str(examples_folder() / "arealite/configs" / f"own_{kind}.yaml"), [*_devices(kind, given), *name, *keys]


def _has_environment(data: str | None) -> bool:
    return data is not None and data.startswith((VERIFIERS, OPENENV))


def _reward(given: Sequence[str]) -> str | dict[str, float]:
    """Read `FILE.py:FUNCTION`, or several `FILE.py:FUNCTION=WEIGHT`, as the value of `reward`."""
    weights: dict[str, float] = {}
    for text in given:
        match = re.fullmatch(r"(.+:\w+)(?:=([-+.\w]+))?", text)
        if match is None or match[1] in weights:
            form = "FILE.py:FUNCTION or FILE.py:FUNCTION=WEIGHT, each function once"
            raise ConfigError(f"--reward must be {form}: got {text}. Correct it.")
        weights[match[1]] = yaml.safe_load(match[2] or "1")
    return next(iter(weights), "") if [*weights.values()] in ([], [1]) else weights


def _name(data: str) -> str:
    """Return the data's name as an experiment's."""
    place = data.partition("?")[0].removesuffix("/")
    file = place.rpartition(":")[0] if re.search(r"\.py:\w+$", place) else place
    name = Path(file).name if data.startswith(OPENENV) else Path(file).stem  # an address has no suffix
    return re.sub(r"^[^A-Za-z0-9_]+|[^A-Za-z0-9_.-]+", "-", name).lstrip("-.") or "own"


def _devices(kind: str, given: Sequence[str]) -> list[str]:
    """Return the keys that use the GPUs of this node, unless keys about devices are given."""
    num_gpus = len(visible_gpus()) if _is_local(given) else 0
    if num_gpus == 0 or any(key.startswith(("allocation_mode=", "cluster.n_gpus_per_node=")) for key in given):
        return []
    if kind == "sft":
        return [f"cluster.n_gpus_per_node={num_gpus}", f"allocation_mode=d{num_gpus}", "model.dtype=bfloat16"]
    return ["cluster.n_gpus_per_node=1", "allocation_mode=lite.d1|d1", "actor.dtype=bfloat16", "lite.dtype=bfloat16"]
