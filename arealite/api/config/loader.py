"""From a YAML file and `key=value` overrides to one checked dataclass, for any config class.

Order: old keys are moved, unknown ones refused, the rest is laid over the defaults, keys that follow another key take
its value, `${...}` is resolved, pydantic checks types and ranges, and the config's own `validate()` checks pairs.
Every failure is a ConfigError that names key, value and fix. Only the YAML file is read and nothing is written.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from arealite.api.config.legacy import migrate
from arealite.api.config.schema import MISSING, ConfigKey, config_help, config_keys
from arealite.api.errors import ConfigError

logger = logging.getLogger("arealite.config")


class Experiment(Protocol):
    """What a config class has besides its fields."""

    DEFAULTS_FROM: ClassVar[dict[str, str]]
    """Keys that take another key's value unless they are given."""

    def validate(self) -> None:
        """Set what follows from several values and refuse contradictions."""


ConfigT = TypeVar("ConfigT", bound=Experiment)
Tree = dict[str, Any]


@dataclass(frozen=True)
class _Source:
    """Values from one place, so that an error can name the place."""

    place: str
    values: Tree


def load_expr_config(
    argv: Sequence[str], config_cls: type[ConfigT], *, ignore_unknown: bool = False
) -> tuple[ConfigT, str]:
    """Load `--config FILE key=value ...` and return the config and the file's path.

    `ignore_unknown` leaves out unknown keys at the top level and in blocks that experiments extend, for a program that
    reads the common part of someone's own config class; it warns of what looks like a typo.
    """
    config_file, overrides = _split_arguments(argv, config_cls)
    keys = {key.name: key for key in config_keys(config_cls)}
    blocks = frozenset(name for name, key in keys.items() if key.block)
    sources = [
        _Source(place, migrate(values, blocks=blocks, leaves=frozenset(keys) - blocks))
        for place, values in (
            (f"in {config_file}", _read_yaml(config_file)),
            ("on the command line", _read_overrides(overrides)),
        )
    ]
    for source in sources:
        _check_keys(source, source.values, "", keys, ignore_unknown=ignore_unknown)
    given = _merge(*(source.values for source in sources))
    values = _resolve(config_cls, given, keys, config_file)
    config = _validate(config_cls, _only_known(values, "", keys), keys, sources)
    config.validate()
    return config, config_file


def to_yaml(config: Any) -> str:
    """Return the resolved config as YAML that loads to the same config."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def _split_arguments(argv: Sequence[str], config_cls: type) -> tuple[str, list[str]]:
    """Separate `--config FILE` from the overrides."""
    config_file, overrides, rest = None, [], iter(argv)
    for argument in rest:
        option, equals, value = argument.partition("=")
        if option == "--config":
            config_file = value if equals else next(rest, None)
        elif option in ("--help", "-h"):
            print(f"usage: --config FILE [key=value ...]\n\n{config_help(config_cls)}")
            sys.exit(0)
        elif equals and not option.startswith("-"):
            overrides.append(argument)
        else:
            raise ConfigError(f"arguments must be --config FILE or key=value: got {argument!r}. Correct or remove it.")
    if not config_file:
        raise ConfigError("--config must be given: got no file. Add --config FILE.yaml.")
    return config_file, overrides


def _read_yaml(path: str) -> Tree:
    """Read the file, references unresolved."""
    if not os.path.isfile(path):
        raise ConfigError(f"--config must name a YAML file: got {path!r}, which does not exist. Correct the path.")
    try:
        loaded = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} must be a YAML file: got {error}. Correct it there.") from error
    values = OmegaConf.to_container(loaded)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold `key: value` lines: got a list. Write keys at the top level.")
    return cast(Tree, values)


def _read_overrides(overrides: list[str]) -> Tree:
    """Read `a.b=value` arguments; values are YAML."""
    config = OmegaConf.create({})
    for override in overrides:
        try:
            config = cast(DictConfig, OmegaConf.merge(config, OmegaConf.from_dotlist([override])))
        except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
            raise ConfigError(f"overrides must be key=value with a YAML value: got {override!r}. {error}") from error
    return cast(Tree, OmegaConf.to_container(config))


def _check_keys(
    source: _Source, values: Tree, prefix: str, keys: dict[str, ConfigKey], *, ignore_unknown: bool
) -> None:
    """Refuse unknown keys, and plain values in place of blocks and vice versa; drop empty blocks."""
    is_open = ignore_unknown and (not prefix or getattr(keys[prefix[:-1]].block, "IS_EXTENDED", False))
    siblings = [key.name for key in keys.values() if key.parent == prefix[:-1]]
    for name, value in list(values.items()):
        key = keys.get(f"{prefix}{name}")
        if key is None:
            if not is_open:
                raise ConfigError(_unknown(f"{prefix}{name}", source, keys))
            if near := difflib.get_close_matches(f"{prefix}{name}", siblings, n=1, cutoff=0.8):
                logger.warning("%s is left to the script. Did you mean %s?", f"{prefix}{name}", near[0])
        elif key.block is not None and isinstance(value, dict):
            _check_keys(source, value, f"{key.name}.", keys, ignore_unknown=ignore_unknown)
        elif key.is_mapping and value is None and not key.is_optional:
            del values[name]
        elif value is not None and not _is_reference(value) and isinstance(value, dict) != key.is_mapping:
            raise ConfigError(f"{key.name} must be a {key.type_name}: got {value!r} {source.place}. Correct it there.")


def _unknown(name: str, source: _Source, keys: dict[str, ConfigKey]) -> str:
    """Explain an unknown key by the known ones that are nearest."""
    parent, _, leaf = name.rpartition(".")
    siblings = [key.name for key in keys.values() if key.parent == parent]
    same_leaf = [key.name for key in keys.values() if key.leaf == leaf]
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7) or same_leaf[:3]
    near = near or difflib.get_close_matches(name, keys, n=1)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Remove it, or use one of {', '.join(siblings)}."
    experiment = next(iter(keys.values())).owner.__name__
    return f"{name} must be a key of {experiment}: got it {source.place}. {hint}"


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _resolve(config_cls: type[Experiment], given: DictConfig, keys: dict[str, ConfigKey], config_file: str) -> Tree:
    """Lay what was given over the defaults, fill in keys that follow others, and resolve references."""
    raw_given = cast(Tree, OmegaConf.to_container(given))
    defaults = dataclasses.asdict(cast(Any, config_cls()))
    for key in keys.values():
        is_given = key.block is not None and isinstance(_lookup(raw_given, key.name), dict)
        if is_given and _lookup(defaults, key.name) is None:
            _lookup(defaults, key.parent)[key.leaf] = dataclasses.asdict(cast(Any, key.block)())
    merged = _merge(defaults, given)
    raw_merged = cast(Tree, OmegaConf.to_container(merged))
    for name, source in config_cls.DEFAULTS_FROM.items():
        is_block_absent = any(raw_merged[key.partition(".")[0]] is None for key in (name, source))
        is_mandatory = _lookup(defaults, name) == MISSING
        if _has(raw_given, name) or is_block_absent or (is_mandatory and not _has(raw_given, source)):
            continue
        OmegaConf.update(merged, name, f"${{{source}}}", merge=False)
    _refuse_missing(cast(Tree, OmegaConf.to_container(merged)), "", keys, config_file)
    try:
        return cast(Tree, OmegaConf.to_container(merged, resolve=True))
    except OmegaConfBaseException as error:
        raise _bad_reference(error) from error


def _merge(*trees: Tree | DictConfig) -> DictConfig:
    """Lay values over each other; later ones win."""
    try:
        return cast(DictConfig, OmegaConf.merge(*(OmegaConf.create(tree) for tree in trees)))
    except OmegaConfBaseException as error:
        raise _bad_reference(error) from error


def _bad_reference(error: OmegaConfBaseException) -> ConfigError:
    first_line = str(error).splitlines()[0]
    return ConfigError(f"{error.full_key} must refer to keys that exist: got {first_line}. Correct the ${{...}}.")


def _lookup(tree: Tree, name: str) -> Any:
    """Return what stands at a dotted key, or None; the tree itself for the empty name."""
    node: Any = tree
    for part in filter(None, name.split(".")):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _has(tree: Tree, name: str) -> bool:
    """Return whether a dotted key was given, by itself or by a reference in place of its block."""
    node: Any = tree
    for part in name.split("."):
        if not isinstance(node, dict):
            return _is_reference(node)
        if part not in node:
            return False
        node = node[part]
    return True


def _refuse_missing(tree: Tree, prefix: str, keys: dict[str, ConfigKey], config_file: str) -> None:
    """Refuse keys that must be given and were not."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            _refuse_missing(value, f"{key}.", keys, config_file)
        elif value == MISSING:
            doc = keys[key].doc if key in keys else ""
            raise ConfigError(
                f"{key} must be given: got nothing. Set it in {config_file} or add {key}=... to the command. ({doc})"
            )


def _only_known(values: Tree, prefix: str, keys: dict[str, ConfigKey]) -> Tree:
    """Leave out unknown keys; without `ignore_unknown` there are none by now."""
    known = {name: value for name, value in values.items() if f"{prefix}{name}" in keys}
    return {
        name: _only_known(value, f"{prefix}{name}.", keys)
        if isinstance(value, dict) and keys[f"{prefix}{name}"].block
        else value
        for name, value in known.items()
    }


def _validate(config_cls: type[ConfigT], values: Tree, keys: dict[str, ConfigKey], sources: list[_Source]) -> ConfigT:
    """Check types and ranges."""
    try:
        return TypeAdapter(config_cls).validate_python(values)
    except ValidationError as error:
        problems = {_key_of(cast(Tree, problem), keys): cast(Tree, problem) for problem in error.errors()}
        raise ConfigError("\n".join(_explain(problems, config_cls.DEFAULTS_FROM, keys, sources))) from error


def _key_of(problem: Tree, keys: dict[str, ConfigKey]) -> str:
    """Map a pydantic error to the deepest config key on its path."""
    parts = [str(part) for part in problem["loc"]]
    prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in keys), prefixes[0])


_RULES = {
    "int_type": "be an integer",
    "int_parsing": "be an integer",
    "int_from_float": "be an integer",
    "float_type": "be a number",
    "float_parsing": "be a number",
    "bool_type": "be true or false",
    "string_type": "be text",
    "list_type": "be a list",
    "dict_type": "be a block of keys",
    "dataclass_type": "be a block of keys",
    "literal_error": "be {expected}",
    "greater_than": "be greater than {gt}",
    "greater_than_equal": "be at least {ge}",
    "less_than": "be less than {lt}",
    "less_than_equal": "be at most {le}",
    "value_error": "be {error}",
}


def _explain(
    problems: dict[str, Tree], defaults_from: dict[str, str], keys: dict[str, ConfigKey], sources: list[_Source]
) -> Iterator[str]:
    """Explain what pydantic found, once: not again for keys that follow a wrong one."""
    for name, problem in problems.items():
        place = next((source.place for source in reversed(sources) if _has(source.values, name)), None)
        if place is None and defaults_from.get(name) in problems:
            continue
        rule = _RULES.get(problem["type"], f"be valid ({problem['msg']})").format(**problem.get("ctx", {}))
        change = (
            f"Change it {place}." if place else f"It follows {defaults_from.get(name, 'its default')}; set it itself."
        )
        doc = f" ({keys[name].doc})" if name in keys else ""
        yield f"{name} must {rule}: got {problem['input']!r}. {change}{doc}"
