"""The allocation grammar: every string of the documents, every kind of mistake, and the round trip."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.api.alloc_mode import AllocationMode, ParallelSizes
from arealite.api.errors import ConfigError
from arealite.api.servers import KINDS


@pytest.mark.parametrize(
    ("text", "backend", "gen", "train"),
    [
        ("sglang.d4p1t1+d4p1t1", "sglang", (4, 1, 1), (4, 1, 1)),
        ("sglang.d12p1t1+d4p1t1", "sglang", (12, 1, 1), (4, 1, 1)),
        ("sglang.d96p1t1+d32p1t1", "sglang", (96, 1, 1), (32, 1, 1)),
        ("d2p1t1+sglang.d6p1t1", "sglang", (6, 1, 1), (2, 1, 1)),
        ("sglang.d4p1t4+d64p1t1", "sglang", (4, 1, 4), (64, 1, 1)),
        ("lite.d2p1t1+d2p1t1", "lite", (2, 1, 1), (2, 1, 1)),
        ("vllm.t2d3p5+p2t7d1", "vllm", (3, 5, 2), (1, 2, 7)),
        ("sglang.t8+d4", "sglang", (1, 1, 8), (4, 1, 1)),
        ("sglang.d2m4+m2", "sglang", (2, 1, 4), (1, 1, 2)),
    ],
)
def test_decoupled_strings(text: str, backend: str, gen: tuple[int, ...], train: tuple[int, ...]) -> None:
    mode = AllocationMode.from_str(text)
    assert (mode.beside, mode.gen_backend) == ("+", backend)
    assert (mode.gen_dp_size, mode.gen_pp_size, mode.gen_tp_size) == gen
    assert (mode.train.data, mode.train.pipeline, mode.train.tensor) == train
    assert mode.gen_instance_size == gen[1] * gen[2]
    assert mode.gen.world_size == gen[0] * gen[1] * gen[2]
    assert mode.train_world_size == train[0] * train[1] * train[2]


@pytest.mark.parametrize("text", ["lite.d1|d1", "d1p1t1|lite.d1p1t1"])
def test_one_device_for_both(text: str) -> None:
    mode = AllocationMode.from_str(text)
    assert mode.is_colocated and str(mode) == "lite.d1p1t1|d1p1t1"
    assert (mode.gen_dp_size, mode.train_world_size, mode.num_devices) == (1, 1, 1)
    assert AllocationMode.from_str("lite.d1+d1").num_devices == 2


@pytest.mark.parametrize("text", ["sglang.d2t2|d4", "d4|sglang.d2t2"])
def test_the_same_devices_for_both(text: str) -> None:
    mode = AllocationMode.from_str(text)
    assert mode.takes_turns and not mode.is_colocated and str(mode) == "sglang.d2p1t2|d4p1t1"
    assert (mode.gen_dp_size, mode.train_world_size, mode.num_devices) == (2, 4, 4)
    assert not AllocationMode.from_str("lite.d1|d1").takes_turns
    assert not AllocationMode.from_str("sglang.d1+d1").takes_turns


@pytest.mark.parametrize(
    ("text", "is_evaluation", "gen_world_size", "train_world_size"),
    [
        ("sglang.d4", False, 4, 0),
        ("lite.d2t2", False, 4, 0),
        ("sglang.d4p1t2+eval", True, 8, 0),
        ("d4", False, 0, 4),
        ("t2p3", False, 0, 6),
    ],
)
def test_one_sided_strings(text: str, is_evaluation: bool, gen_world_size: int, train_world_size: int) -> None:
    mode = AllocationMode.from_str(text)
    assert mode.is_evaluation is is_evaluation
    assert (mode.gen.world_size, mode.train_world_size) == (gen_world_size, train_world_size)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "sizes ''"),
        ("d4p1t1x", "sizes 'd4p1t1x'"),
        ("d0", "sizes 'd0'"),
        ("sglang.d4+t0", "sizes 't0' in 'sglang.d4+t0'"),
        ("d", "sizes 'd'"),
        ("d4d2", "each once"),
        ("d2e3", "got e3 of 'd2e3'"),
        ("d6t2e3", "Write an e that divides d x c x t = 12 and is a multiple of t."),
        ("sglang.d1c2+d1", "servers of d1p1t1c2"),
        ("sglang.d4t1m2+d1", "sizes 'd4t1m2'"),
        ("D4", "sizes 'D4'"),
        ("SGLang.d4+d4", "Did you mean sglang"),
        ("sglng.d4+d4", "Did you mean sglang"),
        ("megatron.d4+d4", "Use one of"),
        ("d4+d4", "got d4+d4. Write e.g. sglang.d4+d4"),
        ("sglang.d4+lite.d4", "got sglang.d4+lite.d4. Write e.g. sglang.d4+d4"),
        ("sglang:d4+d4", "without a dot"),
        ("sglang", "without a dot"),
        ("sglang.", "sizes ''"),
        ("d4+", "got d4+. Write e.g. sglang.d4+d4"),
        ("eval", "got eval. Write e.g. sglang.d4+d4"),
        ("sglang.d4+d4+d4", "got sglang.d4+d4+d4. Write e.g. sglang.d4+d4"),
        ("sglang.d2|d1", "other devices"),
        ("d1|vllm.d1t2", "other devices"),
        ("lite.d2|d2", "more than one device"),
        ("d1|d1", "got d1|d1. Write e.g. sglang.d4+d4"),
        ("lite.d1|eval", "got lite.d1|eval. Write e.g. sglang.d4+d4"),
        ("lite.d1+d1|d1", "got lite.d1+d1|d1. Write e.g. sglang.d4+d4"),
        ("sglang.d４+d4", "sizes 'd４'"),
    ],
)
def test_mistakes_are_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AllocationMode.from_str(text)
    assert words in str(caught.value) and str(caught.value).startswith("allocation_mode must be <backend>.")
    assert isinstance(caught.value, ValueError)


sizes = st.builds(ParallelSizes, *[st.integers(1, 1000)] * 3)


@given(st.sampled_from([*KINDS]), sizes, sizes, st.sampled_from(["servers", "+", "|", "+eval", "trainers"]))
def test_rendered_modes_parse_back(backend: str, gen: ParallelSizes, train: ParallelSizes, form: str) -> None:
    absent = ParallelSizes(data=0)
    if form == "|":
        gen = ParallelSizes() if backend == "lite" else gen
        train = ParallelSizes(gen.tensor, gen.data, gen.pipeline)
    has_servers, beside = form != "trainers", form[:1] if form[0] in "+|" else ""
    mode = AllocationMode(
        backend if has_servers else None,
        gen if has_servers else absent,
        train if form in ("trainers", "+", "|") else absent,
        beside,
    )
    assert AllocationMode.from_str(str(mode)) == mode


@given(st.text(alphabet="dptm+.|sglangeval0123 D", max_size=24))
def test_any_string_parses_or_is_refused(text: str) -> None:
    try:
        mode = AllocationMode.from_str(text)
    except ConfigError:
        return
    assert AllocationMode.from_str(str(mode)) == mode


@given(st.builds(ParallelSizes, *[st.integers(1, 4)] * 4))
def test_the_ranks_of_a_block_are_found(sizes: ParallelSizes) -> None:
    blocks = [sizes.data_rank(rank) for rank in range(sizes.world_size)]
    lasts = [rank for rank in range(sizes.world_size) if sizes.is_last(rank)]
    assert sorted(blocks) == sorted([*range(sizes.data)] * sizes.block_size)
    for block in range(sizes.data):
        last = max(rank for rank, one in enumerate(blocks) if one == block)
        assert [rank for rank in lasts if blocks[rank] == block] == [last]
