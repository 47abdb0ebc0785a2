"""Names in sentences: a list of them, and the one that was probably meant."""

import difflib
from collections.abc import Iterable


def listed(names: Iterable[str]) -> str:
    """Return names as a sentence lists them."""
    *first, last = ["", "none"] if not (found := list(names)) else ["", *found]
    return f"{', '.join(first[1:])} and {last}" if first[1:] else last


def nearest(name: str, names: Iterable[str], *, otherwise: str = "") -> str:
    """Return the name that was probably meant as a question, or what to do instead; by default use one of the names."""
    near = difflib.get_close_matches(name, known := list(names), n=1)
    return f"Did you mean {near[0]}?" if near else otherwise or f"Use one of {', '.join(known)}."
