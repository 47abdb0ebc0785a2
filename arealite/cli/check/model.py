"""Checks of the model that is trained: does it build, are its files whole?"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from arealite.api.cli_args import BaseExperimentConfig as Config
from arealite.cli.check.findings import Findings, counted
from arealite.engine.hf_model import build_meta_model, pick_attention
from arealite.utils.memory_plan import model_shape


def check_model(found: Findings, config: Config) -> PreTrainedModel:
    """Build the architecture without its weights."""
    _, block = config.trained
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_meta_model(block.path, pick_attention(block.attn_impl, device, getattr(torch, block.dtype)))
    shape = model_shape(model)
    size = f"{shape.num_parameters / 1e6:,.3g} million parameters in {counted(shape.num_layers, 'layer')}"
    found.add("ok", f"{type(model).__name__}: {size}, {'tied' if shape.is_tied else 'untied'} embeddings")
    return model


def check_weights(found: Findings, config: Config, model: PreTrainedModel) -> None:
    """Compare the headers of the safetensors files with the architecture."""
    key, block = config.trained
    folder = Path(block.path)
    if block.init_from_scratch or not folder.is_dir():
        source = f"random ({key}.init_from_scratch)" if block.init_from_scratch else "of the hub"
        return found.add("ok", f"{source}; files are not looked at")
    files = sorted(folder.glob("*.safetensors"))
    stored: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                stored |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            found.add("problem", f"{file} must be a whole safetensors file: got {error}", "Download it again.")
    meta = {name: torch.empty(p.shape, device="meta") for name, p in model.named_parameters()}
    expected = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, meta).items()}
    wrong = [f"{name} is missing" for name in expected if name not in stored]
    wrong += [f"{n} is {list(stored[n])}, not {list(s)}" for n, s in expected.items() if stored.get(n, s) != s]
    if wrong:
        told = f"{len(wrong)} of {len(expected)} tensors are not those of the architecture: {'; '.join(wrong[:3])}"
        found.add("problem", told, f"Save or download the model in {folder} again; what is missing is random.")
    else:
        found.add("ok", f"all {len(expected)} tensors in {counted(len(files), 'safetensors file')}")
