"""`arealite train`: the example scripts as ready-made trainers, started by the launcher that `mode` names.

`trainer.type` picks the script, and `trainer.<type>.KEY=value` is `KEY=value` of its config; so are the options for a
model, data and rewards of one's own. Nothing else differs from the launcher's own command line.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from arealite.api.config.loader import as_given, masked
from arealite.api.config.run import load_run_config
from arealite.api.errors import ConfigError
from arealite.cli import own_trainer
from arealite.cli.own_data import Own, is_local
from arealite.cli.trainers import TRAINERS, examples_folder
from arealite.launcher.start import start
from arealite.utils.devices import visible_gpus


def train(
    words: Sequence[str], *, config: str | None, is_dry_run: bool, own: Own | None = None, save_as: str | None = None
) -> int:
    """Start what `trainer.type` names by the launcher that `mode` names, and return the launcher's exit status."""
    own = own or Own()
    kind, keys = _split([*(own.trainer(words) if own else []), *words])
    if kind in TRAINERS:
        script = examples_folder() / "arealite" / f"{TRAINERS[kind]}.py"
        data: list[str] = []
        if own:
            config, data = own.keys(kind, config, keys)
        elif config is None:
            config, data = _default_config(script, keys)
        keys = [*data, *keys]  # of two equal keys the last one counts
    else:
        script, keys = Path(own_trainer.__file__), [f"{own_trainer.TYPE}{kind}", *keys]
        if config is None:
            raise ConfigError("--config must be given for a trainer of your own: got no file. Add --config FILE.yaml.")
    print(f"{own_trainer.TYPE}{kind} is {script} with --config {config}", file=sys.stderr, flush=True)
    if own or save_as is not None:
        given = [key for key in keys if not key.startswith("-")]
        load_run_config(["--config", config, *given], script)  # what is refused is neither shown nor saved
        text = as_given(config, [key for key in given if not key.startswith(own_trainer.TYPE)])
        if own:
            shown = yaml.safe_dump(masked(text), sort_keys=False, allow_unicode=True)
            print(shown, file=sys.stderr, flush=True)
        if save_as is not None:
            _save(save_as, kind, text)
    dry_run = ["--dry-run"] if is_dry_run else []
    return start(script, config, [*dry_run, *keys])


def _save(file: str, kind: str, text: str) -> None:
    """Write a config into a new file."""
    try:
        with open(file, "x", encoding="utf-8") as saved:
            saved.write(f"# arealite train {own_trainer.TYPE}{kind} --config {file}\n{text}")
    except OSError as error:
        raise ConfigError(f"--save-config must be a new file that can be written: got {error}. Correct it.") from error


def _split(words: Sequence[str]) -> tuple[str, list[str]]:
    """Separate `trainer.type` from the keys of the experiment, which lose their prefix."""
    kinds = [word.removeprefix(own_trainer.TYPE) for word in words if word.startswith(own_trainer.TYPE)]
    keys = [word for word in words if not word.startswith(own_trainer.TYPE)]
    kind = kinds[-1] if kinds else ""
    if kind not in TRAINERS and ":" not in kind:
        raise ConfigError(
            f"trainer.type must be {', '.join(TRAINERS)}, or a class of yours such as my_module:MyTrainer: "
            f"got {kind or 'nothing'}. Correct it, or give --model, --data and --reward or --sft."
        )
    prefix = f"trainer.{kind.rpartition(':')[2]}."
    for key in keys:
        if key.startswith("trainer.") and not key.startswith(prefix):
            raise ConfigError(f"keys of the trainer must begin with {prefix}: got {key}. Correct or remove it.")
    return kind, [key.removeprefix(prefix) for key in keys]


def _default_config(script: Path, keys: Sequence[str]) -> tuple[str, list[str]]:
    """Return the example's config for GPUs or for a CPU, and where its data lies if that comes with the examples."""
    has_gpus = "cluster.n_gpus_per_node=0" not in keys and (not is_local(keys) or len(visible_gpus()) > 0)
    file = script.parent / "configs" / f"{script.stem}{'' if has_gpus else '_cpu'}.yaml"
    blocks = yaml.safe_load(file.read_text(encoding="utf-8")).items()
    paths = {f"{name}.path": str(block.get("path")) for name, block in blocks if isinstance(block, dict)}
    above = script.parents[2]
    return str(file), [f"{key}={above / path}" for key, path in paths.items() if path.startswith("examples/")]
