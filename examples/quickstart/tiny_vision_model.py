"""`arealite tiny-model --vision`: a tiny vision-language model (Qwen2.5-VL), as a Hugging Face folder.

Its tokenizer is the tiny language model's plus the special tokens of images; patches are 14 x 14 pixels, and an
image of 56 x 56 becomes four tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tiny_model import INITIALIZER_RANGE, texts_for, train_tokenizer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PATCH, MERGE = 14, 2


def write_tiny_vision_model(*, out: str | Path, corpus: str | Path | None, seed: int, tie: bool = True) -> Path:
    """Write the model to `out`; without a corpus its tokenizer is trained on word problems."""
    return make_tiny_vision_model(out, texts_for(out, corpus, seed), seed=seed, tie=tie)


def make_tiny_vision_model(
    out: str | Path,
    corpus: Iterable[str] | None = None,
    *,
    seed: int = 1,
    vocab_size: int = 512,
    hidden: int = 64,
    layers: int = 2,
    tie: bool = True,
    max_position: int = 2048,
    min_pixels: int = 56 * 56,
    max_pixels: int = 112 * 112,
) -> Path:
    """Write a Qwen2.5-VL model, its tokenizer and its image processor to the folder `out` and return it."""
    tokenizer = train_tokenizer(corpus, vocab_size=vocab_size, max_position=max_position, specials=VISION)
    tokenizer.chat_template = CHAT_TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION))
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 3 * hidden,
        "max_position_embeddings": max_position,
        "initializer_range": INITIALIZER_RANGE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": tie,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": hidden,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "window_size": 2 * PATCH * MERGE,
        "fullatt_block_indexes": [1],
        "initializer_range": INITIALIZER_RANGE,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=tie,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    size = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=size).save_pretrained(out)
    return Path(out)
