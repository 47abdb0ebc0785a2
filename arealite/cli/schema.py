"""`arealite schema`: the JSON schema of a YAML config, by which editors complete keys and mark what is wrong.

It is made of the config classes: types and ranges are those that pydantic checks, descriptions the strings under the
fields. Old keys, which the loader moves, are marked as unknown.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from arealite.api.cli_args import DPOConfig, EvalConfig, GRPOConfig, PPOConfig, RWConfig, SFTConfig
from arealite.api.config.schema import MISSING, ConfigKey, config_keys
from arealite.api.errors import ConfigError
from arealite.reward.functions import load_named

Schema = dict[str, Any]
CLASSES: dict[str, type] = {
    "grpo": GRPOConfig,
    "ppo": PPOConfig,
    "distill": GRPOConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "rw": RWConfig,
    "eval": EvalConfig,
}
_LATER = {"type": "string", "pattern": r"\$\{|^\?\?\?$", "description": "A reference, or ??? for what is given later."}


def write_schema(kind: str, out: str | None) -> int:
    """Write the schema of an experiment's config, or of a class `FILE.py:CLASS`, to a file, or print it."""
    try:
        text = json.dumps(schema(_config_class(kind)), indent=1)
    except TypeError as error:  # from the class without arguments
        raise ConfigError(f"every field of {kind} must have a default: got {error}. Give it one, or ???.") from error
    if out is None:
        print(text)
    else:
        try:
            Path(out).write_text(f"{text}\n")
        except OSError as error:
            raise ConfigError(f"--out must be a file that can be written: got {error}. Choose another.") from error
        print(f"{out}: begin a config with\n# yaml-language-server: $schema={out}")
    return 0


def _config_class(kind: str) -> type:
    """Return the class of an experiment, or the user's own."""
    found = CLASSES.get(kind) or (load_named(kind, key="the kind", kind="config class") if ":" in kind else None)
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        names = ", ".join(CLASSES)
        raise ConfigError(f"the kind must be one of {names}, or FILE.py:CLASS of a dataclass: got {kind}. Correct it.")
    return found


def schema(config_cls: type) -> Schema:
    """Return the JSON schema (draft 7) of a config class."""
    root: Schema = {"$schema": "http://json-schema.org/draft-07/schema#", "title": config_cls.__name__, "$defs": {}}
    blocks = {"": root | _block(config_cls)}
    for key in config_keys(config_cls):
        if key.block is not None:
            found = blocks[key.name] = _block(key.block)
        else:
            found = _value(key, root["$defs"])
        empty = [{"type": "null"}] if key.is_optional or key.is_mapping else []  # a block without keys
        node: Schema = {"anyOf": [found, *empty, _LATER], "description": key.doc}
        if key.default != MISSING and not dataclasses.is_dataclass(key.default):
            node["default"] = key.default
        blocks[key.parent]["properties"][key.leaf] = node
    return blocks[""]


def _block(config_cls: type) -> Schema:
    doc = " ".join((config_cls.__doc__ or "").split())
    return {"type": "object", "description": doc, "properties": {}, "additionalProperties": False}


def _value(key: ConfigKey, definitions: Schema) -> Schema:
    """Return what pydantic knows of a field; text may be written as a number, as the loader takes it."""
    found = TypeAdapter(get_type_hints(key.owner, include_extras=True)[key.leaf]).json_schema()
    definitions |= found.pop("$defs", {})
    return {"anyOf": [{"type": "number"}, found]} if key.type_name.startswith("text") else found
