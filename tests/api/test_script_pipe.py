"""What is printed for `| head` ends without a word when the reader has left."""

import os
import subprocess
import sys

import pytest

HELP = "from arealite.api.cli_args import *; load_expr_config(['--help'], GRPOConfig)"


@pytest.mark.parametrize("words", [["-m", "arealite.cli.main", "schema", "grpo"], ["-c", HELP]])
def test_a_reader_that_leaves(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, *words], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.stderr, done.returncode) == ("", 141)


@pytest.mark.parametrize("redirection", ["| true", ">&-", "> /dev/null"])
def test_an_error_is_shown_also_if_nobody_reads_the_output(redirection: str) -> None:
    code = (
        "from arealite.utils.terminal import *\nwith until_reader_leaves():\n"
        "    print('x')\n    raise ValueError('real')"
    )
    command = f'unset PYTHONUNBUFFERED; set -o pipefail; "$0" -c "$1" {redirection}'
    done = subprocess.run(["bash", "-c", command, sys.executable, code], stderr=subprocess.PIPE, text=True, check=False)
    assert "ValueError: real" in done.stderr and done.returncode in (1, 120)  # Python's own, if it can't flush


def test_without_a_standard_output_a_command_ends_as_with_one() -> None:
    command = '"$0" -m arealite.cli.main schema grpo >&-'
    done = subprocess.run(["bash", "-c", command, sys.executable], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
