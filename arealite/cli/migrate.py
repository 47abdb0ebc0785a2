"""`arealite migrate`: a YAML config of AReaLite v0.3 or AReaL as one of ours; stderr names the changes.

The loader's own tables of old keys do the work, and the loader checks the result.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from omegaconf import OmegaConf

from arealite.api.cli_args import BaseExperimentConfig, GRPOConfig, PPOConfig, SFTConfig, load_expr_config
from arealite.api.config.legacy import Tree, migrate
from arealite.api.config.loader import ABSENT, lookup, read_yaml
from arealite.api.config.types import config_keys
from arealite.api.errors import ConfigError

_DEFAULTS: Tree = {
    "actor.reward_clip": 20.0,
    "actor.baseline": "none",
    "actor.reward_scale": "none",
    "actor.kl_ctl": 0.1,
    "gconfig.n_samples": 1,
}
"""Defaults of v0.3 and of AReaL in 2026 that differ from ours."""
V03 = _DEFAULTS | {"actor.adv_norm": True, "actor.optimizer.eps": 1e-5}
TODAY = _DEFAULTS | {
    "actor.gradient_checkpointing": False,
    "actor.optimizer.lr": 1e-3,
    "actor.optimizer.weight_decay": 0.01,
    "actor.optimizer.beta2": 0.999,
}
_OF_TODAY = {"scheduler", "perf_tracer", "enable_offload"}
_OURS = {"lite", "reward", "perf_trace", "agent", "workers", "mode", "teacher"}
_CHOICES = {"algorithm", "baseline", "reward_scale", "proximal", "correction", "aggregation", "objective", "lora"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print a YAML config of AReaLite v0.3 or AReaL as one of ours: values and order stay, old "
        "defaults that differ are written out, and stderr lists each old key and what became of it."
    )
    parser.epilog = "exit status: 0 the result loads, 1 something is left to decide, 2 the file can't be read"
    parser.add_argument("config", metavar="OLD.yaml")


def run(args: argparse.Namespace) -> int:
    """Print the config; return 0, or 1 if the user must decide something."""
    path = args.config
    given = read_yaml(path)
    config_cls = _config_class(given)
    changes: list[str] = []
    problems: list[str] = []
    keys = {key.name: key for key in config_keys(config_cls)}
    (tree,) = migrate({path: given}, keys, problems, changes).values()
    config = OmegaConf.create(tree)
    for key, value in _old_defaults(tree, given).items():
        OmegaConf.update(config, key, value)
        changes.append(f"{key}={value} is written out: it was the default.")
    text = OmegaConf.to_yaml(config)
    problems += _refusals(text, config_cls)
    print(text, end="")
    for line in [*changes, *(f"to decide: {problem}" for problem in problems)]:
        print(line, file=sys.stderr)
    return 1 if problems else 0


def _config_class(given: Tree) -> type[BaseExperimentConfig]:
    """Return the class of the experiment that a file configures. Raises ConfigError for files of other programs."""
    if "actor" not in given and "model" not in given:
        got = ", ".join(sorted(map(str, given))[:8]) or "no keys"
        raise ConfigError(
            f"the config must be of AReaLite v0.3 or AReaL, with a block actor or model: got {got}. "
            "docs/migration-keys.md lists our keys for those of other frameworks."
        )
    return SFTConfig if "actor" not in given else PPOConfig if "critic" in given else GRPOConfig


def _old_defaults(tree: Tree, given: Tree) -> Tree:
    """Return AReaL's defaults where its file is silent; a file with keys of ours has our defaults."""
    actor = given.get("actor")
    if not isinstance(actor, dict) or _OURS & given.keys() or _CHOICES & actor.keys():
        return {}
    backends = [str(block.get("backend")) for block in given.values() if isinstance(block, dict)]
    is_todays = bool(_OF_TODAY & given.keys()) or "reward_norm" in actor or any(":" in name for name in backends)
    moot = [] if given.get("ref") else ["actor.kl_ctl"]
    return {
        key: value
        for key, value in (TODAY if is_todays else V03).items()
        if key not in moot and lookup(tree, key) is ABSENT and lookup(given, key) is ABSENT
    }


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
