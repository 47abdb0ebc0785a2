"""`arealite migrate`: a YAML config of AReaLite v0.3 or AReaL as one of ours, with a comment at each changed key.

The loader's own tables of old keys do the work, and the loader checks the result.
"""

import argparse
import functools
import json
import logging
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from arealite.api.cli_args import BaseExperimentConfig, GRPOConfig, PPOConfig, SFTConfig, load_expr_config
from arealite.api.config.legacy import Change, hint, migrate, without_placements
from arealite.api.config.loader import read_yaml
from arealite.api.config.types import ConfigKey, config_keys
from arealite.api.errors import ConfigError

Tree = dict[str, Any]

V03: Tree = {
    "actor.reward_clip": 20.0,
    "actor.adv_norm": True,
    "actor.group_reward_norm": False,
    "actor.kl_ctl": 0.1,
    "actor.optimizer.eps": 1e-5,
    "gconfig.n_samples": 1,
}
"""Defaults of v0.3 that differ from ours."""
TODAY: Tree = {
    "actor.reward_clip": 20.0,
    "actor.baseline": "none",
    "actor.reward_scale": "none",
    "actor.kl_ctl": 0.1,
    "actor.gradient_checkpointing": False,
    "actor.optimizer.lr": 1e-3,
    "actor.optimizer.weight_decay": 0.01,
    "actor.optimizer.beta2": 0.999,
    "gconfig.n_samples": 1,
}
"""Defaults of AReaL in 2026 that differ from ours."""
_OF_TODAY = {"scheduler", "perf_tracer", "enable_offload"}
_OURS = {"lite", "reward", "perf_trace", "agent", "workers", "mode", "teacher"}
_CHOICES = {"algorithm", "baseline", "reward_scale", "proximal", "correction", "aggregation", "objective", "lora"}


@dataclass
class _Migrated:
    """A config of ours and what changed on the way."""

    tree: Tree
    comments: dict[str, str] = field(default_factory=dict)  # by our key
    gone: list[str] = field(default_factory=list)  # old keys without a counterpart, with the reason
    problems: list[str] = field(default_factory=list)  # that the user must decide


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a YAML config of AReaLite v0.3 or AReaL as one of ours: values and order stay, a comment names the old "
        "key of each changed one, and old defaults that differ are written out."
    )
    parser.epilog = "exit status: 0 the result loads, 1 something is left to decide, 2 the file can't be read"
    parser.add_argument("config", metavar="OLD.yaml")
    parser.add_argument("--out", metavar="NEW.yaml", help="a new file; printed unless given")


def run(args: argparse.Namespace) -> int:
    """Write the config to --out, or print it; return 0, or 1 if the user must decide something."""
    path, out = args.config, args.out
    if out is not None and Path(out).exists():
        raise ConfigError(f"--out must be a new file: got {out}, which exists. Remove it, or name another.")
    given = read_yaml(path)
    config_cls = _config_class(given)
    new = _migrated(given, {key.name: key for key in config_keys(config_cls)})
    new.problems += _refusals(_page(new, path), config_cls)
    text = _page(new, path)
    if out is None:
        print(text, end="")
    else:
        try:
            Path(out).write_text(text)
        except OSError as error:
            raise ConfigError(f"--out must be a file that can be written: got {error}. Choose another.") from error
    lines = [f"without a counterpart: {len(new.gone)}, at the end of the file"] if new.gone else []
    lines += [f"to decide: {problem}" for problem in new.problems]
    print("\n".join(lines), file=sys.stderr)
    return 1 if new.problems else 0


def _config_class(given: Tree) -> type[BaseExperimentConfig]:
    """Return the class of the experiment that a file configures. Raises ConfigError for files of other programs."""
    if "actor" not in given and "model" not in given:
        got = ", ".join(sorted(map(str, given))[:8]) or "no keys"
        raise ConfigError(
            f"the config must be of AReaLite v0.3 or AReaL, with a block actor or model: got {got}. "
            "docs/migration-keys.md lists our keys for those of other frameworks."
        )
    return SFTConfig if "actor" not in given else PPOConfig if "critic" in given else GRPOConfig


def _migrated(given: Tree, keys: Mapping[str, ConfigKey]) -> _Migrated:
    """Apply the loader's tables of old keys, and add the old defaults that differ from ours."""
    changes: list[Change] = []
    problems: list[str] = []
    logger = logging.getLogger("arealite.config")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the comments of the file say what changed
    try:
        (tree,) = without_placements({"": migrate(given, keys, problems, changes)}, changes).values()
    finally:
        logger.setLevel(level)
    new = _Migrated(tree, problems=problems)
    for change in changes:
        old = "" if (value := _at(given, change.old)) is None else f": {_shown(change.old, value)}"
        new.comments |= dict.fromkeys(change.new, f"{change.old}{old}")
        if not change.new:
            new.gone.append(f"{change.old}{old} -- {change.why}")
    _remove_unknown(new, tree, "", keys)
    _add_defaults(new, given)
    return new


def _remove_unknown(new: _Migrated, block: Tree, prefix: str, keys: Mapping[str, ConfigKey]) -> None:
    """Move unknown keys from the config to the problems; a config class of the user's may have them."""
    for name, value in list(block.items()):
        key = f"{prefix}{name}"
        known = keys.get(key)
        if known is None:
            advice = hint(key, keys) or "Remove it, or keep it in your script's own config class."
            new.problems.append(f"{key} must be a key of ours: got {_shown(key, value)}. {advice}")
            del block[name]
        elif isinstance(value, dict) and known.block is not None:
            _remove_unknown(new, value, f"{key}.", keys)


def _add_defaults(new: _Migrated, given: Tree) -> None:
    """Write AReaL's defaults where its file is silent; a file with keys of ours has our defaults."""
    actor = given.get("actor")
    if not isinstance(new.tree.get("actor"), dict) or not isinstance(actor, dict):
        return
    if _OURS & given.keys() or _CHOICES & actor.keys():
        return
    backends = [str(block.get("backend")) for block in given.values() if isinstance(block, dict)]
    is_todays = bool(_OF_TODAY & given.keys()) or "reward_norm" in actor or any(":" in one for one in backends)
    for key, value in (TODAY if is_todays else V03).items():
        leaf = key.rpartition(".")[2]
        is_given = _at(new.tree, key) is not None or leaf in actor
        is_given |= leaf in ("baseline", "reward_scale") and "group_reward_norm" in actor
        is_moot = (leaf == "kl_ctl" and not given.get("ref")) or (
            leaf == "group_reward_norm" and "reward_norm" in actor
        )
        if not is_given and not is_moot:
            *blocks, name = key.split(".")
            functools.reduce(lambda block, part: block.setdefault(part, {}), blocks, new.tree)[name] = value
            new.comments[key] = f"default of {'AReaL' if is_todays else 'AReaLite v0.3'}"


def _refusals(text: str, config_cls: type[BaseExperimentConfig]) -> list[str]:
    """Load a written config and return the loader's errors."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(text)
        try:
            load_expr_config(["--config", str(file)], config_cls)
        except ConfigError as error:
            return [line.replace(f" in {file}", "").replace(str(file), "this file") for line in str(error).splitlines()]
    return []


def _page(new: _Migrated, path: str) -> str:
    """Return the file: the config with comments above changed keys, then what has no counterpart."""
    lines = [f"# From {Path(path).name}, by arealite migrate: comments name the old keys.", *_lines(new.tree, "", new)]
    for title, items in (("Without a counterpart here", new.gone), ("To decide", new.problems)):
        lines += [f"# {title}:", *map(_comment, items)] if items else []
    return "\n".join(lines) + "\n"


def _lines(block: Tree, prefix: str, new: _Migrated) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in block.items():
        key = f"{prefix}{name}"
        if key in new.comments:
            yield indent + _comment(new.comments[key])
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:"
            yield from _lines(value, f"{key}.", new)
        else:
            yield from (indent + line for line in OmegaConf.to_yaml(OmegaConf.create({name: value})).splitlines())


def _comment(text: str) -> str:
    """Return a comment of one line, without characters that end a line or that YAML rejects."""
    return "# " + "".join(letter if letter.isprintable() else " " for letter in text)


def _shown(key: str, value: Any) -> str:
    """Return a value in one line without secrets, for a comment."""
    shown = _without_secrets(key, value)
    return shown if isinstance(shown, str) else json.dumps(shown, default=str)


def _without_secrets(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_secrets(str(name), inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_secrets(key, inner) for inner in value]
    return "***" if re.search(r"(api_key|token|password|secret)$", key, re.IGNORECASE) else value


def _at(tree: Tree, key: str) -> Any:
    """Return the value at a dotted key, or None."""
    value: Any = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
