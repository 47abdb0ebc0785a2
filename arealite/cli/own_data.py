"""`arealite train --model M --data D --reward R`: a model, data and rewards of one's own, as keys of a config.

Options name nothing that keys can't; of an option and a key the key counts. Without --config the file is
`own_grpo.yaml` or `own_sft.yaml` of the examples, on the devices of this node.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arealite.api.errors import ConfigError
from arealite.cli.own_trainer import TYPE
from arealite.cli.trainers import examples_folder
from arealite.utils.devices import visible_gpus

MODELS = {"grpo": "actor", "sft": "model"}
"""Trainers that the options are for, and the block of the model."""


@dataclass(frozen=True)
class Own:
    """What the options name."""

    model: str | None = None
    data: str | None = None
    rewards: Sequence[str] = ()
    is_sft: bool = False

    def __bool__(self) -> bool:
        return bool(self.model or self.data or self.rewards or self.is_sft)

    def trainer(self, words: Sequence[str]) -> list[str]:
        """Return `trainer.type=` of the options, unless the words name it."""
        named = {word.removeprefix(TYPE) for word in words if word.startswith(TYPE)}
        if named - MODELS.keys() or (self.is_sft and "grpo" in named):
            raise ConfigError(
                "options --model, --data, --reward and --sft must go with trainer.type=grpo, or sft without a reward: "
                f"got {', '.join(sorted(named))}{' and --sft' * self.is_sft}. Give keys of the trainer in their place."
            )
        if self.rewards and (self.is_sft or "sft" in named):
            raise ConfigError(
                f"--reward must be left out of fine-tuning, which learns answers: got {self.rewards[0]}. "
                "Remove it, or fine-tune in a run before."
            )
        return [] if named else [f"{TYPE}{'sft' if self.is_sft else 'grpo'}"]

    def keys(self, kind: str, config: str | None, given: Sequence[str]) -> tuple[str, list[str]]:
        """Return the config's file and the keys that the options mean; `given` are keys beside them."""
        names = {key.partition("=")[0] for key in given}
        options: dict[str, tuple[str, str | dict[str, float] | None]] = {
            f"{MODELS[kind]}.path": ("--model FOLDER", self.model),
            "train_dataset.path": ("--data FILE.jsonl", self.data),
        }
        if kind == "grpo":
            options["reward"] = (_REWARD, _reward(self.rewards))
        for key, (option, value) in options.items():
            if not (config or value or key in names):
                raise ConfigError(f"{option.split()[0]} must be given: got nothing. Add {option}.")
        keys = [f"{key}={json.dumps(value)}" for key, (_, value) in options.items() if value]  # never read as YAML
        if config is None:
            config = str(examples_folder() / "arealite" / "configs" / f"own_{kind}.yaml")
            name = [f"experiment_name={_name(self.data)}-{kind}"] if self.data else []
            keys = [*_devices(kind, given), *name, *keys]
        return config, keys


_REWARD = "--reward FILE.py:FUNCTION, or --sft to learn the answers of the data"


def _reward(given: Sequence[str]) -> str | dict[str, float]:
    """Read `FILE.py:FUNCTION`, or several `FILE.py:FUNCTION=WEIGHT`, as the value of `reward`."""
    weights: dict[str, float] = {}
    for text in given:
        read = re.fullmatch(r"(.+:\w+)(?:=(.+))?", text)
        name, weight = read.groups() if read else ("", None)
        try:
            number = float(weight or 1)
        except ValueError:
            number = 0.0
        if not name or name in weights or number == 0 or not math.isfinite(number):
            raise ConfigError(
                "--reward must be FILE.py:FUNCTION or FILE.py:FUNCTION=WEIGHT, a number but 0, each function once: "
                f"got {text}. Correct it."
            )
        weights[name] = number
    return next(iter(weights), "") if [*weights.values()] in ([], [1.0]) else weights


def _name(data: str) -> str:
    """Return the data's name as an experiment's."""
    place = data.partition("?")[0].removesuffix("/")
    file = place.rpartition(":")[0] if re.search(r"\.py:\w+$", place) else place
    return re.sub(r"^[^A-Za-z0-9_]+|[^A-Za-z0-9_.-]+", "-", Path(file).stem).lstrip("-.") or "own"


def is_local(keys: Sequence[str]) -> bool:
    """Return whether keys leave a run on this node."""
    return [key for key in keys if key.startswith("mode=")][-1:] in ([], ["mode=local"])


def _devices(kind: str, given: Sequence[str]) -> list[str]:
    """Return the keys that use the GPUs of this node, unless some about devices are given."""
    num_gpus = len(visible_gpus()) if is_local(given) else 0
    if num_gpus == 0 or any(key.startswith(("allocation_mode=", "cluster.n_gpus_per_node=")) for key in given):
        return []
    if kind == "sft":
        return [f"cluster.n_gpus_per_node={num_gpus}", f"allocation_mode=d{num_gpus}", "model.dtype=bfloat16"]
    return ["cluster.n_gpus_per_node=1", "allocation_mode=lite.d1|d1", "actor.dtype=bfloat16", "lite.dtype=bfloat16"]
