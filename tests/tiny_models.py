"""Random models of about 20,000 parameters whose distributions are far from uniform, saved as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

EOS = 1
TEXT_VOCAB = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz", " ", "an", "ba", "ana", "the", "ing", "th"]
VOCAB_SIZE = 48
"""A few ids more than the tokenizer has."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer of letters and a few longer tokens, so that one text has several encodings."""
    vocab = {token: index for index, token in enumerate(TEXT_VOCAB)}
    merges = [("a", "n"), ("b", "a"), ("an", "a"), ("t", "h"), ("th", "e"), ("i", "n")]
    vocab["in"] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def config(config_type: type[PreTrainedConfig] = Qwen3Config, **changes: object) -> PreTrainedConfig:
    """Return the config of a two-layer model."""
    return config_type(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": EOS,
            "pad_token_id": 0,
            **changes,
        }
    )


def build(model_config: PreTrainedConfig, *, seed: int) -> PreTrainedModel:
    """Return a random model with sharp and position-dependent distributions."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(model_config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
    return model.eval()


def save_qwen3(path: Path, *, seed: int) -> str:
    """Save a random Qwen3 model and its tokenizer."""
    build(config(), seed=seed).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)
