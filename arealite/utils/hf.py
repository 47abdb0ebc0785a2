"""Loading from Hugging Face folders and hub ids. Code that ships with a model is never run."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from arealite.utils.images import image_processor_of, sees_images

# cuDNN's attention, torch's first choice on Hopper since 2.11, builds a plan of tens of ms for every batch and length.
torch.backends.cuda.enable_cudnn_sdp(False)
_WEIGHTS_AND_TOKENIZER = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


def local_folder(path: str) -> str:
    """Return the folder of a model: the path itself, or the download of a hub id."""
    if Path(path).is_dir():
        return path
    return snapshot_download(path, allow_patterns=_WEIGHTS_AND_TOKENIZER)


@contextlib.contextmanager
def sdpa_required() -> Iterator[None]:
    """Re-raise transformers' error about a model without SDPA attention as one sentence with advice."""
    try:
        yield
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        raise ValueError(
            f"a model must have SDPA attention: got {str(error).split()[0]}, which has none. docs/models.md names "
            "those that work."
        ) from error


def auto_class(config: Any) -> Any:
    """Return the auto class for a language model's config, which may be a vision-language model."""
    return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM


def load_causal_lm(path: str, **options: Any) -> Any:
    """Load a language model from safetensors files."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    return load_model(auto_class(config), path, config=config, **options)


def load_model(kind: Any, path: str, **options: Any) -> Any:
    """Load a model of an auto class from safetensors files only: other weight files are pickles, which may run code."""
    try:
        with sdpa_required():
            return kind.from_pretrained(path, use_safetensors=True, trust_remote_code=False, **options)
    except Exception as error:  # OSError, and SafetensorError of a file that is not whole
        if "safetensor" not in repr(error).lower():
            raise
        raise ValueError(
            f"{path} must hold whole safetensors files: got {error}. Download it again, or convert it."
        ) from error


def as_in_checkpoint(model: PreTrainedModel, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return parameters by their names in a Hugging Face checkpoint; those that transformers fuses on load, such as
    the experts of a layer, are split again."""
    parts = (revert_weight_conversion(model, {name: parameter}) for name, parameter in parameters.items())
    return {name: tensor for part in parts for name, tensor in part.items()}


def load_hf_tokenizer(path: str | Path) -> Any:
    """Load a fast tokenizer; without a pad token, it pads with the eos token."""
    if not str(path):
        raise ValueError("tokenizer path must be a folder or a hub id: got ''. Set tokenizer_path or actor.path.")
    tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    if not tokenizer("text")["input_ids"]:  # transformers makes an empty one where the files are missing
        raise ValueError(f"{path} must hold a tokenizer: got one without tokens. Add tokenizer.json.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_image_processor(path: str | Path) -> Any:
    """Load the image processor that uses PIL and numpy, so that patches are the same on every machine."""
    try:
        return image_processor_of(AutoImageProcessor.from_pretrained(str(path), backend="pil", trust_remote_code=False))
    except ImportError as error:
        raise ImportError("pillow must be installed for images: pip install 'arealite[vision]'.") from error


def require_same_vocabulary(tokenizer: Any, path: str | Path) -> None:
    """Refuse a model to which our token ids mean other words: a teacher, or a reward model."""
    ours, theirs = tokenizer.get_vocab(), load_hf_tokenizer(path).get_vocab()
    if differ := sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)):
        raise ValueError(
            f"{path} must have the vocabulary of the policy: got {len(differ)} tokens with other ids or none, such as "
            f"{', '.join(map(repr, differ[:3]))}. Use a model of the same family."
        )


def require_fixed_rope(config: Any) -> None:
    """Refuse rotary embeddings whose frequencies transformers picks for all rows of a batch by the longest one."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for kind in {one.get("rope_type") for one in (rope, *by_layer_type)} & {"dynamic", "longrope"}:
        raise ValueError(
            f"the rotary embedding of a model must not depend on the longest row: got rope_type {kind}. "
            "Use a model with another rope_type, such as yarn or llama3."
        )


def vocab_size(path: str | Path) -> int | None:
    """Return the number of token ids of a model, which may exceed its tokenizer's; None without a model."""
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        return None
    return int(AutoConfig.from_pretrained(str(path), trust_remote_code=False).get_text_config().vocab_size)
