"""Log lines have the level as the second word; usage errors suggest the closest choice."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import arealite
from arealite.utils.terminal import Parser

SETUP = """
import logging
from arealite.utils.terminal import setup_logging
setup_logging()
setup_logging()
for name in ("arealite.x", "library"):
    logging.getLogger(name).warning("careful")
    logging.getLogger(name).info("news")
    logging.getLogger(name).debug("never")
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return re.sub(r"^\d\d:\d\d:\d\d ", "", done.stderr, flags=re.MULTILINE)


def test_setup_in_a_program():
    assert run(SETUP) == "WARNING arealite.x: careful\nINFO arealite.x: news\nWARNING library: careful\n"


@pytest.mark.parametrize(
    ("program", "words", "told"),
    [
        ("arealite.cli.main", "reprot runs/a", "arealite: error: argument COMMAND: invalid choice: 'reprot'"),
        ("arealite.cli.main", "view runs/a --prot 1", "arealite: error: unrecognized arguments: --prot 1"),
        ("arealite.cli.main", "", "arealite: error: the following arguments are required: COMMAND"),
        ("arealite.cli.main", "replay runs/a --step x", "arealite replay: error: argument --step: invalid int value"),
        ("arealite.cli.main", "init a --template rlvrr", "arealite init: error: argument --template: invalid choice"),
        ("arealite.launcher.local", "train.py", ".local: error: the following arguments are required: --config"),
        ("arealite.server.__main__", "--slot 1", "python -m arealite.server: error: the following arguments are req"),
    ],
)
def test_a_usage_error_ends_in_a_sentence(
    program: str, words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(program).main(words.split())
    *usage, sentence = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and usage[0].startswith("usage: ")
    assert told in sentence
    near = {"reprot": "report", "rlvrr": "rlvr"}
    assert all(sentence.endswith(f". Did you mean {one}?") for typo, one in near.items() if typo in words)


def test_every_command_line_of_users_is_such_a_parser() -> None:
    package = Path(arealite.__file__).parent
    others = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if "argparse.ArgumentParser(" in file.read_text()
    }
    assert others == {"launcher/place/relay.py"}, "which launchers start"
    assert Parser(prog="p").add_subparsers().add_parser("q").error.__func__ is Parser.error
