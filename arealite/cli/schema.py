"""`arealite schema`: the JSON schema of a YAML config, by which editors complete keys and mark what is wrong.

It is made of the config classes: types and ranges are those that pydantic checks, descriptions the strings under the
fields. Old keys, which the loader moves, are marked as unknown.
"""

import dataclasses
import json
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import TypeAdapter

from arealite.api.cli_args import DPOConfig, EvalConfig, GRPOConfig, PPOConfig, RWConfig, SFTConfig
from arealite.api.config.schema import MISSING, ConfigKey, config_keys
from arealite.api.errors import ConfigError

Schema = dict[str, Any]
CLASSES = {
    "grpo": GRPOConfig,
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "rw": RWConfig,
    "eval": EvalConfig,
}
_LATER = {"type": "string", "pattern": r"\$\{|^\?\?\?$", "description": "A reference, or ??? for what is given later."}


def write_schema(kind: str, out: str | None) -> int:
    """Write the schema of an experiment's config to a file, or print it."""
    text = json.dumps(schema(CLASSES[kind]), indent=1)
    if out is None:
        print(text)
    else:
        try:
            Path(out).write_text(f"{text}\n")
        except OSError as error:
            raise ConfigError(f"--out must be a file that can be written: got {error}. Choose another.") from error
        print(f"{out}: begin a config with\n# yaml-language-server: $schema={out}")
    return 0


def schema(config_cls: type) -> Schema:
    """Return the JSON schema (draft 7) of a config class."""
    root: Schema = {"$schema": "http://json-schema.org/draft-07/schema#", "title": config_cls.__name__, "$defs": {}}
    blocks = {"": root | _block(config_cls)}
    for key in config_keys(config_cls):
        if key.block is not None:
            blocks[key.name] = _block(key.block)
            found = _or_later(blocks[key.name], is_optional=key.is_optional)
        else:
            found = _or_later(_value(key, root["$defs"]), is_optional=key.is_optional)
        found["description"] = key.doc
        if key.default != MISSING and not dataclasses.is_dataclass(key.default):
            found["default"] = key.default
        blocks[key.parent]["properties"][key.leaf] = found
    return blocks[""]


def _block(config_cls: type) -> Schema:
    doc = " ".join((config_cls.__doc__ or "").split())
    return {"type": "object", "description": doc, "properties": {}, "additionalProperties": False}


def _value(key: ConfigKey, definitions: Schema) -> Schema:
    """Return what pydantic knows of a field; text may be written as a number, as the loader takes it."""
    hint = get_type_hints(key.owner, include_extras=True)[key.leaf]
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds: list[Schema] = [{"type": "number"}] if key.type_name.startswith("text") else []
    for option in options:
        found = TypeAdapter(option).json_schema() | _limits(option)
        definitions |= found.pop("$defs", {})
        kinds.append(found)
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _limits(hint: Any) -> Schema:
    """Return the range of a number, which pydantic leaves out beside a validator."""
    words = {
        Ge: ("minimum", "ge"),
        Gt: ("exclusiveMinimum", "gt"),
        Le: ("maximum", "le"),
        Lt: ("exclusiveMaximum", "lt"),
    }
    found = {}
    for one in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
        if type(one) in words:
            word, name = words[type(one)]
            found[word] = getattr(one, name)
    return found


def _or_later(found: Schema, *, is_optional: bool) -> Schema:
    """Allow references; an empty block is one without keys."""
    is_empty = [{"type": "null"}] if is_optional or found.get("type") == "object" else []
    return {"anyOf": [found, *is_empty, _LATER]}
