"""JSON for the page. Names of files need not be UTF-8, and texts in JSON files may hold lone surrogates."""

from typing import Any

import orjson

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def to_json(value: Any) -> bytes:
    """Return a value as JSON; lone surrogates are escaped, and numbers that are not finite become null."""
    try:
        return orjson.dumps(value, option=_OPTIONS)
    except orjson.JSONEncodeError:
        return orjson.dumps(_escaped(value), option=_OPTIONS)


def readable(text: str) -> str:
    """Return a text that can be encoded in UTF-8: lone surrogates are escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, dict):
        return {_escaped(key): _escaped(one) for key, one in value.items()}
    return [_escaped(one) for one in value] if isinstance(value, (list, tuple)) else value
