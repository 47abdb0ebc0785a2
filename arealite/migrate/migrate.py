"""`arealite migrate`: a config of AReaL, TRL, verl or prime-rl as one of ours, with a comment at each changed key.

What is written has been loaded by our loader; what that refuses, and what nobody knows, is listed in the file and in
the exit status.
"""

import json
import logging
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from arealite.api.cli_args import BaseExperimentConfig, GRPOConfig, PPOConfig, SFTConfig, load_expr_config
from arealite.api.config.algorithm import DEFAULTS, GRPO_DEFAULTS, PRESETS
from arealite.api.config.loader import read_yaml
from arealite.api.config.schema import config_keys
from arealite.api.errors import ConfigError
from arealite.migrate import FRAMEWORKS, areal, prime_rl, trl, verl
from arealite.migrate.page import notes_of, page
from arealite.migrate.rules import New, Old, Rule, Tree, to_fill_in, translate
from arealite.migrate.shell import keys_of_script

_OF_AREAL = {
    *("actor", "rollout", "gconfig", "train_dataset", "valid_dataset", "cluster", "allocation_mode", "saver", "ref"),
    *("evaluator", "stats_logger", "sglang", "launcher", "total_train_epochs", "async_training", "tokenizer_path"),
    *("checkpointer", "recover", "scheduler", "perf_tracer", "experiment_name", "trial_name", "seed"),
}
_OF_VERL = {"actor_rollout_ref", "algorithm", "data", "trainer", "critic", "reward_model", "custom_reward_function"}
_OF_PRIME = {
    *("orchestrator", "trainer", "inference", "deployment", "model", "ckpt", "wandb", "monitors"),
    *("max_steps", "seq_len", "optim"),
}


@dataclass(frozen=True)
class _Source:
    """What a file is read as."""

    label: str
    config_cls: type[BaseExperimentConfig]
    rules: Mapping[str, Rule] | None = None
    ignored: Mapping[str, str] | None = None
    aliases: Mapping[str, str] | None = None


_TRAINERS = {PPOConfig: "ppo", GRPOConfig: "grpo", SFTConfig: "sft"}
"""trainer.type of `arealite train`."""


def migrate(path: str, *, framework: str | None, out: str | None, devices: int | None) -> int:
    """Write the config to `out`, or print it; return 0, or 1 if something is left to decide. Raises ConfigError."""
    if out is not None and Path(out).exists():
        raise ConfigError(f"--out must be a new file: got {out}, which exists. Remove it, or name another.")
    given, several = _read(Path(path))
    source = _source(given, path, framework)
    if source.rules is not None:
        given = _resolved(given)
    new = _translate(given, source, Path(path), devices)
    new.problems = several + new.problems
    missing = list(to_fill_in(new.tree))
    head = [f"From {Path(path).name} of {source.label}, by arealite migrate: comments name the old keys."]
    head += (
        ["Of a shell script: variables and keys have the first values that it gives them."]
        if path.endswith(".sh")
        else []
    )
    notes = notes_of(Path(path).read_text()) if Path(path).suffix in (".yaml", ".yml") else {}
    refused = _refusal(page(new, head, {}), source.config_cls, missing)
    new.problems += refused
    head += [f"To fill in: {', '.join(missing)}."] if missing else []
    text = page(new, head, notes)
    if out is None:
        print(text, end="")
    else:
        try:
            Path(out).write_text(text)
        except OSError as error:
            raise ConfigError(f"--out must be a file that can be written: got {error}. Choose another.") from error
    _tell(source, new, missing, out, is_refused=bool(refused))
    return 1 if missing or new.problems else 0


def _read(path: Path) -> tuple[Tree, list[str]]:
    """Read YAML, JSON, TOML or the overrides of a shell script, with what is to decide. Raises ConfigError."""
    if path.suffix not in (".toml", ".json", ".sh"):
        return read_yaml(str(path)), []
    try:
        text = path.read_text()
        if path.suffix == ".sh":
            return keys_of_script(text, str(path))
        given = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} must be a file of {path.suffix[1:].upper()}: got {error}. Correct it.") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{path} must hold an object of keys: got {type(given).__name__}. Correct it there.")
    return given, []


def _resolved(given: Tree) -> Tree:
    """Return values in place of references among them; those to the environment stay, which may be secrets."""
    if "oc.env" in json.dumps(given, default=str):
        return given
    try:
        return cast(Tree, OmegaConf.to_container(OmegaConf.create(given), resolve=True))
    except OmegaConfBaseException:
        return given


def _source(given: Tree, path: str, framework: str | None) -> _Source:
    """Find out whose the file is, unless it is said. Raises ConfigError where that can't be known."""
    names = {str(name) for name in given}
    flat = names & (trl.GRPO.keys() | trl.SFT.keys())
    scores = {
        "areal": len(names & _OF_AREAL),
        "trl": len(flat - {"seed"}),
        "verl": len(names & _OF_VERL) + ("actor_rollout_ref" in names),
        "prime-rl": len(names & _OF_PRIME) + ("orchestrator" in names) + path.endswith(".toml"),
    }
    best = max(scores, key=lambda one: scores[one])
    if framework is None and (scores[best] == 0 or list(scores.values()).count(scores[best]) > 1):
        got = ", ".join(sorted(names)[:8]) or "no keys"
        raise ConfigError(f"--from must name the framework of {path}: got {got}. Add --from {'|'.join(FRAMEWORKS)}.")
    return _of(framework or best, given, names)


def _of(framework: str, given: Tree, names: set[str]) -> _Source:
    if framework == "verl":
        algorithm = given.get("algorithm")
        estimator = algorithm.get("adv_estimator", "gae") if isinstance(algorithm, dict) else "gae"
        cls = PPOConfig if estimator == "gae" else GRPOConfig
        return _Source("verl", cls, verl.RULES, verl.IGNORED, verl.ALIASES)
    if framework == "prime-rl":
        if names & {"orchestrator", "trainer"}:
            return _Source("prime-rl (rl)", GRPOConfig, prime_rl.RL, prime_rl.IGNORED, prime_rl.ALIASES)
        return _Source("prime-rl (sft)", SFTConfig, prime_rl.SFT, prime_rl.IGNORED, prime_rl.ALIASES)
    if framework == "trl":
        if others := sorted(names & {*trl.PREFERENCE_KEYS}):
            told = "examples/arealite/configs/dpo.yaml and reward_model.yaml are where those start."
            raise ConfigError(
                f"a config of TRL must be GRPO's or SFT's: got {', '.join(others)}. Write it by hand; {told}"
            )
        if names & {*trl.GRPO_KEYS}:
            return _Source("TRL (GRPO)", GRPOConfig, trl.GRPO, trl.IGNORED)
        return _Source("TRL (SFT)", SFTConfig, trl.SFT, trl.IGNORED)
    if "actor" in names or "model" not in names:
        return _Source("AReaL", PPOConfig if "critic" in names else GRPOConfig)
    return _Source("AReaL (sft)", SFTConfig)


def _translate(given: Tree, source: _Source, path: Path, devices: int | None) -> New:
    keys = {key.name: key for key in config_keys(source.config_cls)}
    if source.rules is None or source.ignored is None:
        level = logging.getLogger("arealite.config").level
        logging.getLogger("arealite.config").setLevel(logging.ERROR)  # the file says what changed
        try:
            return areal.translated(given, keys)
        finally:
            logging.getLogger("arealite.config").setLevel(level)
    choices = DEFAULTS | GRPO_DEFAULTS | (PRESETS["ppo"] if source.config_cls is PPOConfig else {})
    defaults = {key.name: key.default for key in keys.values()}
    defaults |= {f"actor.{key}": value for key, value in choices.items()}
    processes = given.get("num_processes")  # accelerate's, which recipes keep beside TRL's keys
    devices = devices or (processes if isinstance(processes, int) and processes > 0 else 1)
    framework = source.label.partition(" ")[0]
    old = Old(given, source.rules, framework=framework, devices=devices, stem=path.stem, aliases=source.aliases)
    return translate(old, source.ignored, defaults)


def _refusal(text: str, config_cls: type[BaseExperimentConfig], missing: list[str]) -> list[str]:
    """Load what is to be written, with something in each key to fill in; return what the loader refuses."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(text)
        filled = [f"{key}={'0.1' if key.endswith('proportion') else '1'}" for key in missing]
        try:
            load_expr_config(["--config", str(file), *filled], config_cls)
        except ConfigError as error:
            return [line.replace(f" in {file}", "").replace(str(file), "this file") for line in str(error).splitlines()]
    return []


def _tell(source: _Source, new: New, missing: list[str], out: str | None, *, is_refused: bool) -> None:
    """Say on the error stream what was read, what is left to do, and what comes next."""
    told = [f"read as a config of {source.label} (--from says otherwise)"]
    told += [f"without a counterpart: {len(new.gone)}, at the end of the file"] if new.gone else []
    told += [f"to decide: {problem}" for problem in new.problems]
    told += [f"to fill in: {', '.join(missing)}"] if missing else []
    written = out or "what is printed"
    if is_refused:
        told.append(f"{written} does not load yet")
    elif out is not None:
        told.append(f"next: arealite train trainer.type={_TRAINERS[source.config_cls]} --config {out} --dry-run")
    print("\n".join(told), file=sys.stderr)
