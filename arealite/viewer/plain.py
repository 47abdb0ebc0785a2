"""JSON of what the page is told. Names of files need not be UTF-8, and texts in JSON files may hold half characters."""

from typing import Any

import orjson

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def to_json(value: Any) -> bytes:
    """Return a value as JSON; what is no text in UTF-8 is escaped, and what is not finite is null."""
    try:
        return orjson.dumps(value, option=_OPTIONS)
    except orjson.JSONEncodeError:
        return orjson.dumps(_escaped(value), option=_OPTIONS)


def readable(text: str) -> str:
    """Return a text that is UTF-8: a half character becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, dict):
        return {_escaped(key): _escaped(one) for key, one in value.items()}
    return [_escaped(one) for one in value] if isinstance(value, (list, tuple)) else value
