"""The text of each token, by the run's own tokenizer, as far as it is on this disk: nothing is downloaded."""

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from arealite.api.run_folder import RunFolder, numbered
from arealite.utils.files import reading

_FILE = "tokenizer.json"


def tokenizer_file(run: RunFolder, config: dict[str, Any]) -> Path | None:
    """Return the file of the tokenizer that a run used: of its model, or of what it saved."""
    blocks = ("actor", "model")
    named = [config.get("tokenizer_path"), *((config.get(block) or {}).get("path") for block in blocks)]
    for path in [str(path) for path in named if path]:
        if (file := Path(path) / _FILE).exists():
            return file
        with contextlib.suppress(HFValidationError):  # of a path that is no name of a hub
            if isinstance(cached := try_to_load_from_cache(path, _FILE), str):
                return Path(cached)
    saved = [folder / _FILE for folder in numbered(run.checkpoints, "step_").values()]
    return next((file for file in reversed(saved) if file.exists()), None)


def token_texts(file: Path, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; a character of several tokens stands at its last one. Raises FileError."""
    with reading(file, Exception):  # the library has no classes for its errors
        tokenizer, stream = _loaded(file, file.stat().st_mtime_ns), DecodeStream(skip_special_tokens=False)
        return [stream.step(tokenizer, token) or "" for token in ids]


@functools.lru_cache(4)
def _loaded(file: Path, changed_ns: int) -> Tokenizer:
    return Tokenizer.from_file(str(file))
