"""Runs an example script in a fork, as its only rank."""

import runpy
from multiprocessing.connection import Connection
from pathlib import Path

import torch


def main(_: Connection, script: Path, argv: list[str]) -> None:
    torch.set_num_threads(1)
    runpy.run_path(str(script))["main"](argv)
