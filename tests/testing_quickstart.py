"""The quickstart's tiny model and word problems, which lie with the examples."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "quickstart"))

from tiny_model import CHAT_TEMPLATE, END, PAD, ROLES, make_tiny_model, texts_for, train_tokenizer, write_tiny_model
from tiny_vision_model import make_tiny_vision_model
from word_problems import PATH as WORD_PROBLEMS
from word_problems import curriculum, is_held_out, pairs, rows

__all__ = [
    "CHAT_TEMPLATE",
    "END",
    "PAD",
    "ROLES",
    "WORD_PROBLEMS",
    "curriculum",
    "is_held_out",
    "make_tiny_model",
    "make_tiny_vision_model",
    "pairs",
    "rows",
    "texts_for",
    "train_tokenizer",
    "write_tiny_model",
]
