"""`arealite tiny-model`: a model of a quarter million random parameters and its tokenizer, as a Hugging Face folder.

It lets whole experiments run on a CPU in seconds. The tokenizer is byte-level, so any text survives a round trip,
and never merges digits, so that arithmetic is learnable. Its chat template is append-only: a conversation's tokens
are a prefix of those of every continuation, including the end-of-turn token that the model itself samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import word_problems
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from arealite.api.errors import ConfigError

PAD, END = "<|pad|>", "<|end|>"
INITIALIZER_RANGE = 0.06
"""Standard deviation of the random weights; larger than the usual 0.02, because the model is narrow."""
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_PROBLEMS = 3000
"""Number of word problems to train the tokenizer on if no corpus is given."""
# Words with their leading space, single digits, runs of punctuation, whitespace.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s"


def write_tiny_model(
    *, out: str | Path, corpus: str | Path | None, seed: int, tie: bool = True, max_position: int = 2048
) -> Path:
    """Write the model to `out`; without a corpus its tokenizer is trained on word problems."""
    return make_tiny_model(out, texts_for(out, corpus, seed), seed=seed, tie=tie, max_position=max_position)


def texts_for(out: str | Path, corpus: str | Path | None, seed: int) -> Iterable[str]:
    """Return the texts for training the tokenizer of the model at `out`."""
    if Path(out).is_file():
        raise ConfigError(f"--out must be a folder: got {out}, which is a file. Choose another.")
    disable_progress_bar()
    if corpus is not None:
        return _texts(Path(corpus))
    return [text for row in word_problems.rows("train", seed=seed, train=NUM_PROBLEMS) for text in row.values()]


def make_tiny_model(
    out: str | Path,
    corpus: Iterable[str] | None = None,
    *,
    seed: int = 1,
    vocab_size: int = 512,
    hidden: int = 64,
    layers: int = 4,
    heads: int = 2,
    kv_heads: int = 1,
    mlp: int = 192,
    tie: bool = True,
    max_position: int = 2048,
) -> Path:
    """Write a Qwen3 model and a tokenizer trained on `corpus` to the folder `out` and return it.

    Without a corpus the vocabulary is the 256 bytes and the special tokens.
    """
    if hidden % heads or heads % kv_heads:
        raise ValueError(
            f"heads must divide hidden and be a multiple of kv_heads: got hidden={hidden}, heads={heads}, "
            f"kv_heads={kv_heads}. Use powers of two."
        )
    tokenizer = train_tokenizer(corpus, vocab_size=vocab_size, max_position=max_position)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=mlp,
        tie_word_embeddings=tie,
        max_position_embeddings=max_position,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return Path(out)


def train_tokenizer(
    corpus: Iterable[str] | None, *, vocab_size: int, max_position: int, specials: Sequence[str] = ()
) -> Any:
    """Train a byte-level BPE tokenizer with at most `vocab_size` tokens, special ones included."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = [PAD, END, *ROLES, *specials]
    if vocab_size < len(alphabet) + len(specials):
        raise ValueError(
            f"vocab_size must be at least {len(alphabet) + len(specials)} (every byte and the special tokens): "
            f"got {vocab_size}. Use 512."
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(() if corpus is None else corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=specials[2:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_position,
        clean_up_tokenization_spaces=False,
    )


def _texts(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, or the string values of the objects of a jsonl file."""
    if not path.is_file():
        raise ConfigError(f"--corpus must be a text or jsonl file: got {path}, which does not exist. Correct it.")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if path.suffix != ".jsonl":
                yield line
            elif line.strip():
                yield from _strings(line, f"{path}:{number}")


def _strings(line: str, place: str) -> list[str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place} must be one JSON object: {error}. Fix the line.") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{place} must be one JSON object: got {type(row).__name__}. Fix the line.")
    return [value for value in row.values() if isinstance(value, str)]
