"""The package as a library: public names, found late by Python and at once by type checkers."""

import ast
import importlib
from pathlib import Path

import pytest

import arealite

SOURCE = Path(arealite.__file__).read_text()


def test_type_checkers_see_the_names_that_python_finds() -> None:
    blocks = [node for node in ast.parse(SOURCE).body if isinstance(node, ast.If)]
    seen = [
        (one.module, alias.name, alias.asname)
        for block in blocks
        for one in block.body
        if isinstance(one, ast.ImportFrom)
        for alias in one.names
    ]
    assert len(seen) == len(arealite._MODULES)
    assert {*seen} == {(module, name, name) for name, module in arealite._MODULES.items()}


def test_public_names_are_those_of_their_modules() -> None:
    for name, module in arealite._MODULES.items():
        assert getattr(arealite, name) is getattr(importlib.import_module(module), name)
    assert {"RLVRWorkflow", "FSDPPPOActor", "__version__"} <= {*dir(arealite)}


def test_other_names_are_none() -> None:
    with pytest.raises(AttributeError, match="module 'arealite' has no attribute 'FSDPPPOActr'"):
        _ = arealite.FSDPPPOActr
    assert (Path(arealite.__file__).parent / "py.typed").is_file()
