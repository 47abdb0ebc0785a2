"""Values that are given are merged into defaults as OmegaConf merges them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from arealite.api.config.loader import _merged
from arealite.api.config.types import MISSING

NAMES = st.sampled_from("abc")
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([MISSING, "x", ""]), st.lists(st.integers())
)
TREES = st.dictionaries(
    NAMES, st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=8)
)


@given(TREES, TREES)
def test_as_omegaconf_does(tree: dict[str, Any], values: dict[str, Any]) -> None:
    expected = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(tree), OmegaConf.create(values)))
    before = repr((tree, values))
    assert _merged(tree, values) == expected
    assert repr((tree, values)) == before
