"""What is printed for `| head` ends without a word when the reader has left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/arealite/gsm8k_grpo.py"


@pytest.mark.parametrize("words", [["-m", "arealite.cli.main", "schema", "grpo"], [str(SCRIPT), "--help"]])
def test_a_reader_that_leaves(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, *words], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.stderr, done.returncode) == ("", 141)
