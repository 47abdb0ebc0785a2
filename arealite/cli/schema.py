"""`arealite schema`: the JSON schema of a YAML config, with which editors complete keys and mark mistakes.

It is generated from the config classes: pydantic's types and ranges, and the strings under the fields as descriptions.
Old keys, which the loader moves, are marked as unknown.
"""

import argparse
import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from pydantic_core import CoreSchema, core_schema

from arealite.api.config.experiment import EXPERIMENTS
from arealite.api.config.types import MISSING, ConfigBase
from arealite.api.errors import ConfigError
from arealite.reward.functions import load_named

Schema = dict[str, Any]
CLASSES: dict[str, type[ConfigBase]] = {kind: cls for cls in EXPERIMENTS for kind in cls.SCRIPTS}
_LATER = {"type": "string", "pattern": r"\$\{|^\?\?\?$", "description": "A reference, or ??? for what is given later."}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print types, ranges, defaults and descriptions of every key. An editor with a YAML language server finds them "
        "in the file that the first line of a config names: # yaml-language-server: $schema=schema.json"
    )
    kinds = f"{', '.join(CLASSES)} (grpo unless given), or FILE.py:CLASS, a config class of your own"
    parser.add_argument("kind", nargs="?", default="grpo", help=kinds)


def run(args: argparse.Namespace) -> int:
    """Print the schema of an experiment's config, or of a class `FILE.py:CLASS`."""
    print(json.dumps(schema(_config_class(args.kind)), indent=1))
    return 0


def _config_class(kind: str) -> type[ConfigBase]:
    """Return the class of an experiment, or the user's own."""
    named = CLASSES.get(kind) or (load_named(kind, key="the kind", kind="config class") if ":" in kind else None)
    if not isinstance(named, type) or not issubclass(named, ConfigBase):
        names = ", ".join(CLASSES)
        raise ConfigError(
            f"the kind must be one of {names}, or FILE.py:CLASS of a config class: got {kind}. Correct it."
        )
    return named


def schema(config_cls: type[ConfigBase]) -> Schema:
    """Return the JSON schema (draft 7) of a config class."""
    return config_cls.model_json_schema(schema_generator=_YAMLSchema)


class _YAMLSchema(GenerateJsonSchema):
    """Also accepts what the loader accepts: references, `???`, numbers for text, empty blocks."""

    schema_dialect = "http://json-schema.org/draft-07/schema#"

    def generate(self, schema: CoreSchema, mode: JsonSchemaMode = "validation") -> Schema:
        return {"$schema": self.schema_dialect, **super().generate(schema, mode)}

    def model_field_schema(self, schema: core_schema.ModelField) -> Schema:
        value = super().model_field_schema(schema)
        default = value.pop("default", MISSING)
        if isinstance(block := schema["schema"].get("default"), ConfigBase):
            default = block.model_dump(exclude_defaults=True)  # other defaults are in the schema of its class
        return {"anyOf": [value, _LATER], **({} if default == MISSING else {"default": default})}

    def model_schema(self, schema: core_schema.ModelSchema) -> Schema:
        return super().model_schema(schema) | {"type": ["object", "null"]}

    def dict_schema(self, schema: core_schema.DictSchema) -> Schema:
        return super().dict_schema(schema) | {"type": ["object", "null"]}

    def str_schema(self, schema: core_schema.StringSchema) -> Schema:
        return super().str_schema(schema) | {"type": ["string", "number"]}
