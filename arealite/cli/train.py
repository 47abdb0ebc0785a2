"""`arealite train`: the example scripts as ready-made trainers, started by the launcher that `mode` names.

`trainer.type` picks the script, and `trainer.<type>.KEY=value` is `KEY=value` of its config. Nothing else differs from
the launcher's own command line.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from arealite.api.errors import ConfigError
from arealite.cli import own_trainer
from arealite.cli.trainers import TRAINERS, examples_folder
from arealite.launcher import local, ray, slurm
from arealite.launcher.plan.jobs import visible_gpus

MODES = {"local": local.main, "ray": ray.main, "slurm": slurm.main}


def train(words: Sequence[str], *, config: str | None, is_dry_run: bool) -> int:
    """Start what `trainer.type` names by the launcher that `mode` names, and return the launcher's exit status."""
    kind, mode, keys = _split(words)
    if kind in TRAINERS:
        script = examples_folder() / "arealite" / f"{TRAINERS[kind]}.py"
        if config is None:
            config, data = _default_config(script, mode, keys)
            keys = [*data, *keys]  # of two equal keys the last one counts
    else:
        script, keys = Path(own_trainer.__file__), [f"{own_trainer.TYPE}{kind}", *keys]
        if config is None:
            raise ConfigError("--config must be given for a trainer of your own: got no file. Add --config FILE.yaml.")
    print(f"{own_trainer.TYPE}{kind} is {script} with --config {config}", file=sys.stderr, flush=True)
    dry_run = ["--dry-run"] if is_dry_run else []
    return MODES[mode]([str(script), "--config", config, *dry_run, *keys])


def _split(words: Sequence[str]) -> tuple[str, str, list[str]]:
    """Separate `trainer.type` and `mode` from the keys of the experiment, which lose their prefix."""
    given = {"trainer.type": "", "mode": "local"}
    keys = []
    for word in words:
        key, _, value = word.partition("=")
        if key in given:
            given[key] = value
        else:
            keys.append(word)
    kind, mode = given.values()
    if kind not in TRAINERS and ":" not in kind:
        raise ConfigError(
            f"trainer.type must be {', '.join(TRAINERS)}, or a class of yours such as my_module:MyTrainer: "
            f"got {kind or 'nothing'}. Add trainer.type=grpo, or correct it."
        )
    if mode not in MODES:
        raise ConfigError(f"mode must be local, ray or slurm: got {mode or 'nothing'}. Correct it.")
    prefix = f"trainer.{kind.rpartition(':')[2]}."
    for key in keys:
        if key.startswith("trainer.") and not key.startswith(prefix):
            raise ConfigError(f"keys of the trainer must begin with {prefix}: got {key}. Correct or remove it.")
    return kind, mode, [key.removeprefix(prefix) for key in keys]


def _default_config(script: Path, mode: str, keys: Sequence[str]) -> tuple[str, list[str]]:
    """Return the example's config for GPUs or for a CPU, and where its data lies if that comes with the examples."""
    has_gpus = "cluster.n_gpus_per_node=0" not in keys and (mode != "local" or len(visible_gpus()) > 0)
    file = script.parent / "configs" / f"{script.stem}{'' if has_gpus else '_cpu'}.yaml"
    blocks = yaml.safe_load(file.read_text(encoding="utf-8")).items()
    paths = {f"{name}.path": str(block.get("path")) for name, block in blocks if isinstance(block, dict)}
    above = script.parents[2]
    return str(file), [f"{key}={above / path}" for key, path in paths.items() if path.startswith("examples/")]
