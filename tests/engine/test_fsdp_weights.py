"""Which rank sends which tensors."""

from __future__ import annotations

from arealite.api.io_struct import ParamSpec
from arealite.engine.fsdp_weights import shared_out


def of(parameter: str, num_bytes: int, part: int = 0) -> tuple[str, ParamSpec]:
    return parameter, ParamSpec(f"{parameter}.{part}", (num_bytes // 4,), "float32")


def test_every_sender_owns_about_as_many_bytes_of_a_bucket() -> None:
    """The largest first, each to the one that has least."""
    sizes = {"embed": 400, "q": 100, "k": 40, "v": 40, "o": 100, "mlp": 320}
    (bucket,) = shared_out([[of(*one) for one in sizes.items()]], [0, 8, 16], sizes.keys())
    assert {spec.name: spec.owner for spec in bucket} == {
        "embed.0": 0,
        "mlp.0": 8,
        "q.0": 16,
        "o.0": 16,
        "k.0": 16,
        "v.0": 16,
    }
    assert [spec.name for spec in bucket] == [f"{name}.0" for name in sizes], "in send order"


def test_what_changes_alone_is_shared_out_as_well() -> None:
    sizes = {"embed": 4000, "q": 100, "mlp": 4000, "v": 100, "norm": 4}
    (bucket,) = shared_out([[of(*one) for one in sizes.items()]], [0, 1], {"q", "v"})
    owners = {spec.name: spec.owner for spec in bucket}
    assert owners["q.0"] != owners["v.0"] and owners["embed.0"] != owners["mlp.0"]


def test_the_tensors_of_a_parameter_have_one_owner_also_in_several_buckets() -> None:
    """Which gathers it once: transformers fuses the experts of a layer."""
    first = [of("embed", 400), *(of("experts", 200, part) for part in range(3))]
    second = [*(of("experts", 200, part) for part in range(3, 5)), of("norm", 8), of("head", 300)]
    buckets = list(shared_out([first, second], [0, 1], {"embed", "experts", "norm", "head"}))
    owners = {spec.name: spec.owner for bucket in buckets for spec in bucket}
    assert {owners[f"experts.{part}"] for part in range(5)} == {0} and owners["embed.0"] == 1
    assert owners["head.0"] == owners["norm.0"] == 1, "the rest of the experts weighs 400 there"
