"""Every layout of a model over ranks computes what one rank does: losses, logprobs, all gradients, and a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import layout_program
import pytest
import testing_forks
import torch

from arealite.api.alloc_mode import ParallelSizes
from arealite.api.cli_args import FSDPEngineConfig, MicroBatchSpec

LAYOUTS = [
    ("qwen3", "d2"),
    ("qwen3", "t2"),
    ("llama", "c2"),
    ("qwen3_moe", "d2e2"),
]
MORE = [
    ("deepseek_v3", "c2"),
    ("deepseek_v3", "d2t2e4"),
    ("deepseek_v3", "d2p2e2"),
    ("llama", "p2c2"),
    ("llama", "p2"),
    ("llama", "d2p2"),
    ("qwen2", "p2t2"),
    ("qwen3_moe", "d2p2t2e2"),
    ("qwen3_moe", "p2c2"),
    ("llama", "t2"),
    ("qwen2", "d2t2"),
    ("qwen3", "d2t2"),
    ("qwen3", "c4"),
    ("qwen3", "d2c2"),
    ("qwen3", "c2t2"),
    ("qwen3", "d2c2t2"),
    ("mixtral", "d2e2"),
    ("mixtral", "d4e2"),
    ("qwen3_moe", "t2"),
    ("qwen3_moe", "d2t2e2"),
    ("qwen3_moe", "d2t2e4"),
    ("qwen3_moe", "d2c2t2e4"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    found: dict[Any, list[dict[str, Any]]] = {}
    folder = tmp_path_factory.mktemp("layouts")

    def run_once(kind: str, layout: str, program: Any = layout_program.main, **changes: Any) -> list[dict[str, Any]]:
        key = kind, layout, program, repr(changes)
        if key not in found:
            path, out = folder / kind, tmp_path_factory.mktemp("ranks")
            if not path.exists():
                layout_program.write_model(path, kind)
            num, more = ParallelSizes.from_str(layout).world_size, [changes] if program is layout_program.main else []
            with testing_forks.ranks_of(num, program, str(path), layout, *more, out) as ranks:
                assert [rank.end() for rank in ranks] == [0] * num
            found[key] = [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(num)]
        return found[key]

    return run_once


def assert_equal(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for rank in found:
        for name in ("logprobs", "entropies"):
            torch.testing.assert_close(rank[name], expected[name][rank["rows"]], atol=2e-5, rtol=0)
        for step in ("first", "second"):
            assert rank[step] == pytest.approx(expected[step], rel=5e-6)
        assert rank["fingerprint"] == found[0]["fingerprint"]
        shares_rows = any(rank["rows"] == other["rows"] for other in found if other is not rank)
        assert ("must have the same rows" in rank.get("refused", "")) == shares_rows
    sent = {name: tensor for rank in found for name, tensor in rank["sent"].items()}
    assert sum(len(rank["sent"]) for rank in found) == len(sent) and max(len(rank["sent"]) for rank in found) < len(
        sent
    )
    for name, tensor in found[0]["weights"].items():
        assert torch.equal(sent[name], tensor), name
    for kind in ("gradients", "weights"):
        ours, one = found[0][kind], expected[kind]
        assert ours.keys() == one.keys()
        largest = max(float(tensor.abs().max()) for tensor in one.values())
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, one[name], atol=2e-6 * largest, rtol=0, msg=f"{name} differs")


@pytest.mark.parametrize(("kind", "layout"), [*LAYOUTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)])
def test_a_layout_computes_what_one_rank_does(run: Any, kind: str, layout: str) -> None:
    (expected,) = run(kind, "d1")
    assert_equal(run(kind, layout), expected)


OPTIONS = {
    "copies": ("qwen3", "d2t2", {"fsdp": FSDPEngineConfig(dp_replicate=2)}),
    "reduced once": ("qwen3", "d2t2", {"fsdp": FSDPEngineConfig(reduce_once=True)}),
    "recomputed and offloaded": (
        "qwen3_moe",
        "t2e2",
        {"gradient_checkpointing": True, "activation_offloading": True, "fsdp": FSDPEngineConfig(offload_params=True)},
    ),
    "logits of more precision": ("llama", "p2", {"cast_lm_head_to_fp32": True}),
    "copies and experts": ("qwen3_moe", "d4e2", {"fsdp": FSDPEngineConfig(dp_replicate=2)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_changes_no_number_of_a_layout(run: Any, name: str) -> None:
    kind, layout, changes = OPTIONS[name]
    (expected,) = run(kind, "d1")
    assert_equal(run(kind, layout, **changes), expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["t2", "d2c2", "d2t2e4"])
def test_the_load_of_experts_is_balanced_over_all_ranks(run: Any, layout: str) -> None:
    changes = {"router_aux_loss_coef": 0.5, "mb_spec": MicroBatchSpec(), "gradient_checkpointing": True}
    (expected,), (without,) = run("qwen3_moe", "d1", **changes), run("qwen3_moe", "d1")
    assert expected["first"]["grad_norm"] > 1.01 * without["first"]["grad_norm"]
    assert_equal(run("qwen3_moe", layout, **changes), expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["d2", "t2"])
def test_a_model_that_sees_images_learns_as_on_one_rank(run: Any, layout: str) -> None:
    (expected,) = run("qwen2_5_vl", "d1", layout_program.see)
    for rank in (found := run("qwen2_5_vl", layout, layout_program.see)):
        assert rank["fingerprint"] == found[0]["fingerprint"]
        for ours, one in zip(rank["steps"], expected["steps"], strict=True):
            assert ours == pytest.approx(one, rel=5e-6)
    for name, tensor in found[0]["weights"].items():
        torch.testing.assert_close(tensor, expected["weights"][name], atol=2e-6, rtol=0, msg=f"{name} differs")


CHECKPOINTS = {
    "dense": ("llama", ["d2t2", "d3", "c2t2", "d2p2", "d1"]),
    "stages": ("llama", ["p2t2", "d4", "d1"]),
    "experts": ("qwen3_moe", ["d2e2", "t2", "d2t2e4", "d2p2", "d1"]),
    "columns of experts": ("qwen3_moe", ["d2t2", "d4e4", "d1"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_is_read_in_any_layout(tmp_path: Path, name: str) -> None:
    kind, layouts = CHECKPOINTS[name]
    path = layout_program.write_model(tmp_path / "model", kind)
    for layout in layouts:
        num = ParallelSizes.from_str(layout).world_size
        with testing_forks.ranks_of(num, layout_program.resume, path, layouts, layout, tmp_path) as ranks:
            assert [rank.end() for rank in ranks] == [0] * num, layout


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["t2", "c2", "p2", "d2t2"])
def test_an_algorithm_learns_as_on_one_rank(run: Any, layout: str) -> None:
    (expected,) = run("llama", "d1", layout_program.update)
    for rank in run("llama", layout, layout_program.update):
        for name in (*layout_program.ALGORITHMS, "dpo", "rw"):
            for ours, one in zip(rank[name], expected[name], strict=True):
                assert ours == pytest.approx(one, rel=1e-5, abs=1e-6), name
    if layout == "p2":
        for name in layout_program.ALGORITHMS:
            last = run("llama", layout, layout_program.update)[-1]
            for key, values in expected[f"{name} per token"].items():
                torch.testing.assert_close(last[f"{name} per token"][key], values, atol=1e-5, rtol=0)


FAMILIES = ["Mistral", "Gemma", "Gemma3Text", "Phi3", "SmolLM3", "Olmo2", "Granite", "GPTNeoX"]
WITHOUT_STAGES = {"GPTNeoX"}
"""`check_sizes` refuses p for these."""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (kind, layout)
        for kind in FAMILIES
        for layout in ("t2", "c2", "p2")
        if layout != "p2" or kind not in WITHOUT_STAGES
    ],
)
def test_a_family_is_divided(run: Any, kind: str, layout: str) -> None:
    """docs/models.md lists what each can do."""
    (expected,) = run(kind, "d1")
    assert_equal(run(kind, layout), expected)
