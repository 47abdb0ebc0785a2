"""From a YAML file and `key=value` overrides to one checked dataclass, for any experiment.

Order: old keys are moved, unknown ones refused, the rest is laid over the defaults, keys that follow another key take
its value, `${...}` is resolved, pydantic checks types and ranges, the config's `derive()` fills in what follows from
several keys, and its `check()` refuses contradictions.
Every failure is a ConfigError that names key, value and fix. Only the YAML file is read and nothing is written.
"""

import copy
import difflib
import functools
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from arealite.api.config.experiment import BaseExperimentConfig
from arealite.api.config.legacy import OURS, Tree, migrate
from arealite.api.config.types import MISSING, ConfigKey, config_help, config_keys, rule_of
from arealite.api.errors import ConfigError
from arealite.api.script import refuse_import, show_errors_briefly
from arealite.utils.terminal import until_reader_leaves

logger = logging.getLogger("arealite.config")
# All ranks of a run read the same config: only rank 0 logs warnings about it.
logger.addFilter(lambda record: os.environ.get("RANK", "0") == "0")

ConfigT = TypeVar("ConfigT", bound=BaseExperimentConfig)
Keys = dict[str, ConfigKey]
Sources = dict[str, Tree]
"""Values by the place that they were given in, which an error names; later ones win."""

ABSENT = object()
"""What `lookup` returns without a value."""
_HEADER = "# from environment variables: "
_ARTICLES = {"block": "a ", "list": "a ", "number": "a ", "integer": "an "}


def load_expr_config(
    argv: Sequence[str], config_cls: type[ConfigT], *, ignore_unknown: bool = False
) -> tuple[ConfigT, str]:
    """Load `--config FILE key=value ...` and return the config and the file's path.

    `ignore_unknown` leaves out unknown keys at the top level and in blocks that experiments extend, for a program that
    reads the common part of someone's own config class, which judges them itself.
    """
    show_errors_briefly()
    refuse_import()
    if "__dataclass_fields__" in vars(config_cls):
        raise ConfigError(f"{config_cls.__name__} must be a plain class: got a dataclass. Remove @dataclass above it.")
    config_file, overrides = _split_arguments(argv, config_cls)
    keys = {key.name: key for key in config_keys(config_cls)}
    given = {f"in {config_file}": read_yaml(config_file), "on the command line": read_overrides(overrides)}
    problems: list[str] = []
    changes: list[str] = []
    sources = migrate(given, keys, problems, changes, has_others=ignore_unknown)
    for change in changes:
        logger.warning(change)
    for place, values in sources.items():
        problems += _key_problems(values, "", place, keys, ignore_unknown=ignore_unknown)
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        references, values = _resolve(config_cls, sources, keys, config_file)
    except OmegaConfBaseException as error:
        got = str(error).splitlines()[0]
        message = f"{error.full_key} must refer to keys that exist: got {got}. Correct the ${{...}}."
        raise ConfigError(message) from error
    config = _validate(config_cls, values, keys, sources, ignore_unknown=ignore_unknown)
    config.derive()
    config.check()
    config._from_environment = _from_environment(references, values)
    return config, config_file


def given_value(key: str, config_file: str, overrides: Sequence[str]) -> Any:
    """Return the given value of a key of the top level, None without one. Nothing is checked."""
    return (read_yaml(config_file) | read_overrides([*overrides])).get(key)


def as_given(config_file: str, overrides: Sequence[str]) -> str:
    """Return the file with the overrides laid over it, as YAML: defaults are left out, and references stay."""
    return OmegaConf.to_yaml(OmegaConf.create(_merged(read_yaml(config_file), read_overrides([*overrides]))))


def to_yaml(config: BaseExperimentConfig) -> str:
    """Return the resolved config as YAML that loads to the same config. It may hold secrets: see `masked`."""
    text: str = OmegaConf.to_yaml(OmegaConf.create(config.model_dump()))
    return f"{_HEADER}{' '.join(config._from_environment)}\n{text}"


def masked(text: str) -> Tree:
    """Return what `to_yaml` has written without what may be secret: values that environment variables brought in, and
    those of the variables that processes are given."""
    named = text.partition("\n")[0].removeprefix(_HEADER).split() if text.startswith(_HEADER) else []
    tree = cast(Tree, yaml.safe_load(text) or {})
    for path, block, name in _leaves(tree):
        if path in named:
            block[name] = "***"
        elif path.endswith("_env_vars"):
            block[name] = ",".join(f"{item.partition('=')[0]}=***" for item in block[name].split(",") if item)
    return tree


def _from_environment(references: Tree, values: Tree) -> list[str]:
    """Return the keys of references that bring the value of an environment variable, also through other keys. Names of
    runs are no secrets."""
    names = re.findall(r"oc\.env:\s*(\w+)", json.dumps(references, default=str))
    secrets = [os.environ[name] for name in names if os.environ.get(name)]
    texts = {path: str(block[name]) for path, block, name in _leaves(references)}
    return [
        path
        for path, block, name in _leaves(values)
        if "${" in texts.get(path, "${")  # a block may be a reference as a whole
        and any(secret in str(block[name]) for secret in secrets)
        and path not in ("experiment_name", "trial_name")
    ]


def _leaves(block: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield of every value that is no block and no list its dotted key, what holds it, and its name there."""
    for name, value in block.items() if isinstance(block, dict) else enumerate(block):
        if isinstance(value, dict | list):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", block, name


def _split_arguments(argv: Sequence[str], config_cls: type) -> tuple[str, list[str]]:
    """Separate `--config FILE` from the overrides."""
    config_file, overrides, rest = None, [], iter(argv)
    for argument in rest:
        option, equals, value = argument.partition("=")
        if option == "--config":
            config_file = value if equals else next(rest, None)
        elif option in ("--help", "-h"):
            usage = f"usage: {Path(sys.argv[0]).name} --config FILE [key=value ...], or --help WORD for keys with it"
            words = itertools.takewhile(lambda word: word[0] != "-" and "=" not in word, filter(None, rest))
            with until_reader_leaves():
                print(f"{usage}\n\n{config_help(config_cls, [*words])}")
            sys.exit(0)
        elif equals and not option.startswith("-"):
            overrides.append(argument)
        else:
            key = option.lstrip("-")
            is_flag = key != option
            change = f"Write {key}={value or '...'}." if is_flag else "Correct or remove it."
            raise ConfigError(f"arguments must be --config FILE or key=value: got {argument!r}. {change}")
    if not config_file:
        raise ConfigError("--config must be given: got no file. Add --config FILE.yaml.")
    return config_file, overrides


def read_yaml(path: str) -> Tree:
    """Read a YAML file of keys, references unresolved. Raises ConfigError."""
    if not os.path.isfile(path):
        raise ConfigError(f"--config must name a YAML file: got {path!r}, which does not exist. Correct the path.")
    try:
        loaded = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
        raise ConfigError(f"{path} must be a YAML file: got {error}. Correct it there.") from error
    values = OmegaConf.to_container(loaded)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold `key: value` lines: got a list. Write keys at the top level.")
    return cast(Tree, values)


def read_overrides(overrides: list[str]) -> Tree:
    """Read `a.b=value` arguments; values are YAML."""
    config = OmegaConf.create({})
    for override in overrides:
        try:
            config = cast(DictConfig, OmegaConf.merge(config, OmegaConf.from_dotlist([override])))
        except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
            raise ConfigError(f"overrides must be key=value with a YAML value: got {override!r}. {error}") from error
    return cast(Tree, OmegaConf.to_container(config))


def _key_problems(values: Tree, prefix: str, place: str, keys: Keys, *, ignore_unknown: bool) -> Iterator[str]:
    """Yield what is wrong with keys: unknown ones, and plain values in place of blocks and vice versa; drop empty
    blocks. Unknown keys of a script, at the top level and in blocks that experiments extend, are its own."""
    block = keys[prefix[:-1]].block if prefix else None
    has_others = ignore_unknown and (block is None or block.IS_EXTENDED)
    for name, value in list(values.items()):
        key = keys.get(f"{prefix}{name}")
        if key is not None and "." in str(name):  # OmegaConf would keep it beside the block, and nothing would read it
            parent, _, leaf = str(name).rpartition(".")
            yield f"{key.name} must stand in its block: got it with dots {place}. Write {leaf} under {parent}."
        elif key is None and not has_others:
            experiment = next(iter(keys.values())).owner.__name__
            inner = _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else ()
            known = [path for path, _, _ in inner if path.rpartition(".")[2] in OURS]
            for path in known or [f"{prefix}{name}"]:
                yield f"{path} must be a key of {experiment}: got it {place}. {_advice(path, keys)}"
        elif key is None:
            continue
        elif key.block is not None and isinstance(value, dict):
            yield from _key_problems(value, f"{key.name}.", place, keys, ignore_unknown=ignore_unknown)
        elif key.is_mapping and value is None and not key.is_optional:
            del values[name]
        elif value is not None and not _is_reference(value) and key.is_mapping not in (isinstance(value, dict), None):
            article = _ARTICLES.get(key.type_name.partition(" ")[0], "")
            yield f"{key.name} must be {article}{key.type_name}: got {value!r} {place}. Correct it there."


def _advice(name: str, keys: Keys) -> str:
    """Suggest our name for another framework's key, the key of the same block that an unknown one resembles, or keys of
    other blocks with its last part."""
    parent, _, leaf = name.rpartition(".")
    if "critic" not in keys and (leaf == "critic" or OURS.get(leaf, "").startswith("critic")):
        return "A critic is part of PPOConfig: use examples/arealite/gsm8k_ppo.py."
    ours = [key for key in keys if leaf in OURS and f".{key}".endswith(f".{OURS[leaf]}")]
    if ours:
        return f"It is called {next((key for key in ours if key.split('.')[0] == name.split('.')[0]), ours[0])} here."
    siblings = {key.leaf: key.name for key in keys.values() if key.parent == parent}
    near = [siblings[match] for match in difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.7)]
    near = near or [key.name for key in keys.values() if key.leaf == leaf][:3]
    return f"Did you mean {' or '.join(near)}?" if near else "Remove it; --help lists all keys."


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _resolve(
    config_cls: type[BaseExperimentConfig], sources: Sources, keys: Keys, config_file: str
) -> tuple[Tree, Tree]:
    """Merge the given values into the defaults, fill in keys that follow others; return references and values."""
    given = functools.reduce(_merged, sources.values())
    defaults = config_cls().model_dump()
    for key in keys.values():
        is_given = key.block is not None and isinstance(lookup(given, key.name), dict)
        if is_given and lookup(defaults, key.name) is None:
            lookup(defaults, key.parent)[key.leaf] = cast(Any, key.block)().model_dump()
    tree = _merged(defaults, given)
    absent = {name for name, value in tree.items() if value is None}
    for name, source in config_cls.sources().items():
        block, _, leaf = name.rpartition(".")
        is_given = lookup(given, name) is not ABSENT and not _repeats_a_name(sources, name, source)
        is_block_absent = not absent.isdisjoint(key.partition(".")[0] for key in (name, source))
        is_left_missing = lookup(defaults, name) == MISSING and lookup(given, source) is ABSENT
        if not (is_given or is_block_absent or is_left_missing):
            lookup(tree, block)[leaf] = f"${{{source}}}"
    for key in keys.values():
        if lookup(tree, key.name) == MISSING:
            fix = f"Set it in {config_file} or add {key.name}=... to the command."
            raise ConfigError(f"{key.name} must be given: got nothing. {fix} ({key.doc})")
    return tree, cast(Tree, OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True))


def _merged(tree: Any, given: Any) -> Any:
    """Return a tree with the given values in place of its own, as `OmegaConf.merge`, which takes ten times as long."""
    if given == MISSING:
        return tree
    if not (isinstance(tree, dict) and isinstance(given, dict)):
        return copy.deepcopy(given)
    return tree | {name: _merged(tree.get(name, MISSING), value) for name, value in given.items()}


def _repeats_a_name(sources: Sources, name: str, source: str) -> bool:
    """Tell whether the file only repeats the run's name or folder in a block, as the `config.yaml` of a run does, while
    the command line names another: with the old one a new run would take over the folder of the old one."""
    file, command_line = sources.values()
    return (
        name.rpartition(".")[2] in ("experiment_name", "trial_name", "fileroot")
        and lookup(file, name) == lookup(file, source)
        and lookup(command_line, name) is ABSENT
        and lookup(command_line, source) is not ABSENT
    )


def lookup(tree: Tree, name: str) -> Any:
    """Return what stands at a dotted key, or a reference in place of one of its blocks; `ABSENT` if nothing does."""
    node: Any = tree
    for part in filter(None, name.split(".")):
        if not isinstance(node, dict):
            return node if _is_reference(node) else ABSENT
        node = node.get(part, ABSENT)
    return node


def _validate(
    config_cls: type[ConfigT], values: Tree, keys: Keys, sources: Sources, *, ignore_unknown: bool
) -> ConfigT:
    """Check types and ranges. A wrong value is reported once, not again for keys that follow it."""
    try:
        return config_cls.model_validate(values, extra="ignore" if ignore_unknown else None)
    except ValidationError as error:
        problems = {_key_of(problem, keys): problem for problem in error.errors()}
        lines = []
        for name, problem in problems.items():
            place = next((p for p, given in reversed(sources.items()) if lookup(given, name) is not ABSENT), None)
            source = config_cls.sources().get(name)
            if place is None and source in problems:
                continue
            change = f"Change it {place}." if place else f"It follows {source or 'its default'}; set it itself."
            doc = f" ({keys[name].doc})" if name in keys else ""
            is_in_list = problem["type"] in ("missing", "extra_forbidden")  # `_key_problems` judges all other keys
            shown = ".".join(map(str, problem["loc"])) if is_in_list else name
            lines.append(f"{shown} must be {rule_of(problem)}: got {problem['input']!r}. {change}{doc}")
        raise ConfigError("\n".join(lines)) from error


def _key_of(problem: ErrorDetails, keys: Keys) -> str:
    """Map a pydantic error to the deepest config key on its path."""
    parts = [str(part) for part in problem["loc"]]
    prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in keys), prefixes[0])
