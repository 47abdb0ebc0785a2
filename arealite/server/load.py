"""From the folder of a model to a server that can listen, in a process of its own or in that of the trainer."""

import json
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from arealite.generation.engine import GenerationEngine
from arealite.generation.model_runner import ModelRunner
from arealite.server.app import Server
from arealite.utils.files import reading
from arealite.utils.hf import load_causal_lm, load_hf_tokenizer, load_image_processor, local_folder
from arealite.utils.images import sees_images
from arealite.utils.weight_transfer import DTYPES


def load_server(
    path: str,
    *,
    dtype: str,
    device: str,
    slots: int,
    context: int,
    threads: int,
    deterministic: bool,
    allow_stale_kv: bool,
    seed: int,
    secret: str | None,
    weight_version: str = "0",
) -> tuple[GenerationEngine, Server]:
    """Load a model and start the thread that generates; ValueError, OSError or ImportError if it can't be served.

    `seed` is for requests without one, `weight_version` the version of the weights in the folder."""
    folder = local_folder(path)
    options = {"dtype": DTYPES[dtype], "local_files_only": True, "attn_implementation": "sdpa"}
    try:
        model, told = load_causal_lm(folder, **options, output_loading_info=True)
    except (SafetensorError, RuntimeError) as error:  # half of a file, or shapes of another model
        raise ValueError(
            f"{path} must hold the weights that its config describes: got {error} Save or download it again."
        ) from error
    except (StrictDataclassError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"the configs in {path} must describe a model of transformers: got {type(error).__name__}: {error}. "
            "Correct them, or download them again."
        ) from error
    if missing := sorted(told["missing_keys"]):  # transformers made them up
        raise ValueError(
            f"{path} must have every tensor of {type(model).__name__}: got {len(missing)} missing, "
            f"{', '.join(missing[:3])}. Save or download it again."
        )
    runner = ModelRunner(model.to(device), slots=slots, context=context, deterministic=deterministic)
    has_tokenizer = any((Path(folder) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
    tokenizer: PreTrainedTokenizerBase | None = load_hf_tokenizer(folder) if has_tokenizer else None
    image_processor = load_image_processor(folder) if sees_images(model.config) else None
    engine = GenerationEngine(
        runner,
        eos_ids=end_of_sequence_ids(folder, tokenizer),
        tokenizer=tokenizer,
        version=weight_version,
        threads=threads,
        allow_stale_kv=allow_stale_kv,
    )
    server = Server(engine, tokenizer, model_path=path, image_processor=image_processor, seed=seed, secret=secret)
    return engine, server


def end_of_sequence_ids(model_path: str, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Collect the ids that end a sequence from the folder's config, generation config and tokenizer."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = Path(model_path) / name
        if file.exists():
            with reading(file):
                eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
                ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
