"""Pages of the keys of every experiment: type, default and meaning, as the classes declare them."""

import functools
import json
import re
from collections.abc import Iterable

from arealite.api import cli_args
from arealite.api.config.experiment import EXPERIMENTS, BaseExperimentConfig
from arealite.api.config.types import MISSING, ConfigKey, config_keys

FOLDER = "reference/config"
Declared = dict[str, ConfigKey]
"""A key as each experiment declares it, by the name of the experiment's class."""


@functools.cache
def experiments() -> list[type[BaseExperimentConfig]]:
    """Return the config classes of the bundled experiments."""
    return sorted(EXPERIMENTS, key=lambda cls: cls.__name__)


@functools.cache
def declared_keys() -> dict[str, Declared]:
    """Return every key of every experiment, a block before its own keys."""
    keys: dict[str, Declared] = {}
    for cls in experiments():
        for key in config_keys(cls):
            keys.setdefault(key.name, {})[cls.__name__] = key
    return keys


def pages() -> dict[str, str]:
    """Return one page per top-level block and one page of all other keys, by path; each key is one heading."""
    blocks: dict[str, list[str]] = {}
    keys = declared_keys()
    for name, declared in keys.items():
        top = name.partition(".")[0]
        is_block = any(key.block for key in keys[top].values())
        blocks.setdefault(top if is_block else "", []).append(_section(name, declared))
    found = {f"{FOLDER}/{top}.md": "\n".join(lines) for top, lines in blocks.items() if top}
    return {f"{FOLDER}/index.md": _index(keys, blocks)} | found


def _index(keys: dict[str, Declared], blocks: dict[str, list[str]]) -> str:
    """Return the page of keys outside blocks, which links to the other pages."""
    lines = [
        f"# Configuration\n\nAll {len(keys)} keys and blocks of {_listed(cls.__name__ for cls in experiments())}, as "
        "declared by their classes. `python3 SCRIPT.py --help` prints the keys of a script; `--dry-run` and the "
        "`config.yaml` of a run show the values. A key that *follows* another key has its value unless it is given.\n",
        "| block | contents | experiments |\n|---|---|---|",
    ]
    for top in filter(None, blocks):
        doc = max((key.doc for key in keys[top].values()), key=len)  # where there are several, the one that tells more
        lines.append(f"| [`{top}`]({top}.md) | {escaped(doc)} | {_of(keys[top])} |")
    return "\n".join([*lines, "\n## Keys of the top level\n", *blocks[""]])


def _section(name: str, declared: Declared) -> str:
    """Return heading, type, default and meaning of a key; a line per experiment if they differ."""
    is_block = any(key.block for key in declared.values())
    level = "###" if not is_block else "##" if "." in name else "#"
    told: dict[tuple[str, str], list[str]] = {}
    for experiment, key in declared.items():
        told.setdefault((_type_and_default(name, experiment, key), key.doc), []).append(experiment)
    lines = [f"{level} `{name}` {{ #{name} }}\n"]
    for (told_type, doc), owners in told.items():
        of = _of({owner: declared[owner] for owner in owners})
        lines.append(f"{told_type} *{of}*\n\n{escaped(doc)}\n")
    return "\n".join(lines)


def _type_and_default(name: str, experiment: str, key: ConfigKey) -> str:
    """Return the type and the default in words."""
    cls: type[BaseExperimentConfig] = getattr(cli_args, experiment)
    if source := cls.sources().get(name):
        default = f"follows [`{source}`]({_link(source)})"
    elif key.default == MISSING:
        default = "must be given"
    elif key.block is not None and key.default is not None:
        return "A block."
    else:
        is_text = isinstance(key.default, str) and key.default
        default = f"default `{key.default if is_text else json.dumps(key.default)}`"
    return f"{escaped(key.type_name)}; {default}."


def _link(name: str) -> str:
    top = name.partition(".")[0]
    is_block = any(key.block for key in declared_keys()[top].values())
    return f"{top if is_block else 'index'}.md#{name}"


def _of(declared: Declared) -> str:
    """Return which experiments have a key."""
    return "all experiments" if len(declared) == len(experiments()) else _listed(declared)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name.removesuffix("Config") for name in names)


def escaped(text: str) -> str:
    """Return a sentence of the code as Markdown; outside of code, `<`, `*`, `_` and brackets are escaped."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([<*_\[\]|])", r"\\\1", part) for part in parts)
