"""The page of commands: the `--help` of each."""

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

PATH = "reference/commands.md"
PROGRAMS = (
    "arealite.launcher.local",
    "arealite.launcher.ray",
    "arealite.launcher.slurm",
    "arealite.launcher.torchrun",
    "arealite.server.__main__",
)
"""Modules that are run by `python3 -m`. Wrappers of SGLang and vLLM take the flags of those programs."""


def pages() -> dict[str, str]:
    """Return the page, by path."""
    lines = [
        "# Commands\n",
        "The output of `--help`. Keys of a config (`key=value`) are listed under [configuration](config/index.md).\n",
        *(f"## `{title}`\n\n```text\n{text}```\n" for title, text in helps()),
    ]
    return {PATH: "\n".join(lines)}


def helps() -> Iterator[tuple[str, str]]:
    """Yield every command with its help."""
    main = import_module("arealite.cli.main").main
    whole = _help(main, [])
    yield "arealite", whole
    for command in commands(whole):
        yield f"arealite {command}", _help(main, [command])
    for module in PROGRAMS:
        yield f"python3 -m {module.removesuffix('.__main__')}", _help(_main(module), [])


def commands(text: str) -> list[str]:
    """Return the names of commands in the help of `arealite`."""
    return re.findall(r"^    ([a-z][\w-]*)", text.partition("\ncommands:")[2], re.MULTILINE)


def _main(name: str) -> Any:
    """Return what parses the command line of a module."""
    module = import_module(name)
    return module.parse_args if hasattr(module, "parse_args") else module.main


def _help(main: Callable[[Sequence[str]], object], words: list[str]) -> str:
    """Return the output of `--help` after these words, 84 columns wide and without colours."""
    before = dict(os.environ)
    os.environ |= {"COLUMNS": "84", "NO_COLOR": "1"}
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            main([*words, "--help"])
    finally:
        os.environ.clear()
        os.environ.update(before)
    return printed.getvalue()
