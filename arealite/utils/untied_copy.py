"""A copy of a model folder whose output layer is a tensor of its own, for servers that can't reload a tied one.

The copy links to everything but its config and the one tensor that it has more, so it costs no more than that tensor,
and the original must stay where it is. Invariant: a folder under the copy's name is complete.

As a program it takes the model and the copy's folder, for whoever does not want torch in its own process.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from arealite.utils.hf import local_folder

_CONFIG, _WHOLE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_LINKED, _ADDED = "model-tied.safetensors", "model-output.safetensors"
"""With an index, as the copy has one, no file may be called `model.safetensors`: it would be taken for everything."""


def write_untied_copy(model: str | Path, out: str | Path) -> None:
    """Write the untied copy of a folder or hub id to `out`, in the place of what lies there."""
    source, partial = Path(local_folder(str(model))), Path(f"{out}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_untied_weights(source, partial, _write_untied_config(source, partial))
    for file in source.iterdir():
        if file.name not in (_CONFIG, _INDEX):
            (partial / (_LINKED if file.name == _WHOLE else file.name)).symlink_to(file.resolve())
    shutil.rmtree(out, ignore_errors=True)
    os.rename(partial, out)


def tied_names(model: PreTrainedModel) -> tuple[str, str]:
    """Return the names of the input embeddings and of the output layer that is the same tensor."""
    embeddings = model.get_input_embeddings().weight
    names = [name for name, one in model.named_parameters(remove_duplicate=False) if one is embeddings]
    if len(names) != 2:
        raise ValueError(
            f"a model must have tied embeddings to be served untied: got {type(model).__name__}, where the tensor of "
            f"the input embeddings has the names {names}. Remove rollout.untie_embeddings."
        )
    return names[0], names[1]


def _write_untied_config(source: Path, out: Path) -> list[str]:
    """Write `config.json` for an untied model; return what checkpoints call its embeddings and its output layer."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    values = json.loads((source / _CONFIG).read_text(encoding="utf-8"))
    text = config.get_text_config()
    for part in [values, *(values[key] for key in values if getattr(config, key, None) is text)]:
        part["tie_word_embeddings"] = False
    (out / _CONFIG).write_text(json.dumps(values, indent=2), encoding="utf-8")
    return [key for name in tied_names(model) for key in revert_weight_conversion(model, {name: torch.empty(0)})]


def _write_untied_weights(source: Path, out: Path, names: list[str]) -> None:
    """Write the output layer, unless the checkpoint holds it already, and the index of all files."""
    embeddings, output = names
    files = _weight_map(source)
    if embeddings not in files:
        raise ValueError(f"{source} must hold the tensor {embeddings}: got none. Save it again with transformers.")
    tensor = _read(source, files, embeddings)
    if output not in files:
        save_file({output: tensor}, out / _ADDED, metadata={"format": "pt"})
    elif not torch.equal(tensor, _read(source, files, output)):
        raise ValueError(
            f"{output} must equal {embeddings} in a model with tied embeddings: got different tensors in {source}. "
            "Set tie_word_embeddings to false in its config.json and remove rollout.untie_embeddings."
        )
    linked = {name: _LINKED if file == _WHOLE else file for name, file in files.items()}
    index = {"metadata": {}, "weight_map": {output: _ADDED} | linked}
    (out / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _weight_map(source: Path) -> dict[str, str]:
    """Return the file of every tensor."""
    if (source / _INDEX).exists():
        weight_map: dict[str, str] = json.loads((source / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return weight_map
    if not (source / _WHOLE).exists():
        raise ValueError(f"a model must be stored as safetensors: got {source}. Save it again with transformers.")
    with safe_open(source / _WHOLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), _WHOLE)


def _read(source: Path, files: dict[str, str], name: str) -> Any:
    with safe_open(source / files[name], framework="pt") as file:
        return file.get_tensor(name)


def main(arguments: list[str]) -> None:
    """Write the copy, or say in one line why not."""
    try:
        write_untied_copy(*arguments)
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
