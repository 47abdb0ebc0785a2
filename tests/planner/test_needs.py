"""What a config needs of memory, worked by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from testing_models import QWEN3_8B

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.planner.memory import GIB, ModelShape
from arealite.planner.needs import Verdict, needs_of

CONFIG = """
experiment_name: e
trial_name: t
allocation_mode: sglang.d4+d4
cluster: {n_gpus_per_node: 8, fileroot: unused}
gconfig: {n_samples: 4, max_new_tokens: 64}
actor: {dtype: float32, gradient_checkpointing: false, mb_spec: {max_tokens_per_mb: 512}}
lite: {context: 512}
train_dataset: {path: problems.jsonl, batch_size: 8}
"""


def test_a_plan_for_gpus_worked_by_hand(tmp_path: Path) -> None:
    """A model of 1 G parameters; 4 ranks with 8 of the 32 answers of 1024 tokens each, 4 servers with 8 each."""
    shape = ModelShape(
        num_parameters=2**30,
        layer_parameters=2**25,
        outer_parameters=2**28,
        num_layers=24,
        hidden=2048,
        mlp=8192,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        vocab=2**17,
        has_qk_norm=False,
        is_tied=True,
    )
    (tmp_path / "config.yaml").write_text(CONFIG)

    def plan(gpu: float, *overrides: str, **others: ModelShape) -> list[Verdict]:
        arguments = ["actor.path=m", "gconfig.max_new_tokens=1000", "actor.dtype=bfloat16", *overrides]
        config = load_expr_config(["--config", str(tmp_path / "config.yaml"), *arguments], GRPOConfig)[0]
        needs = needs_of(config, shape, 24 + config.gconfig.max_new_tokens, others)
        return [*needs.verdicts(int(gpu * 2**30), 2**35)]

    # A rank: parameters 1, gradients 1, moments 2 GiB. A minibatch has 2 of the 8 groups, 2 answers a rank, each of
    # which fills a micro-batch of 1024 tokens. Most is there in the backward pass of a layer: gathered in bf16 0.625,
    # the gradient of the output layer's weight, and that of a layer in bf16, in float32 and, a quarter, as what is
    # received. Of each layer autograd keeps two norms, their outputs, queries, keys, values and the MLP.
    layer = 2 * 2048 * 6 + 8 + 2 * 2048 * 2 + (3 * 2048 + 2 * 1024) * 2 + 64 + 4 * 8192 * 2
    needed = 4.625 + 24 * 1024 * layer / 2**30 + 2**17 * 2048 * 2 / 2**30 + 2**25 * 7 / 2**30
    rank, cache = plan(80)
    assert (rank.level, rank.text) == ("ok", f"a trainer rank needs about {needed:.2f} of 80.0 GiB")
    room = int((int(80 * 2**30 * 0.9) - 2**31) / (2 * 24 * 8 * 128 * 2))
    assert cache.level == "ok" and f"holds {room:,} of the 8,192 tokens asked for at once" in cache.text
    lite = (
        "allocation_mode=lite.d4+d4",
        "lite.device=cuda",
        "lite.dtype=bfloat16",
        "lite.slots=7",
        "lite.context=2048",
    )
    # All slots and the spare one, from the start.
    room = int((int(80 * 2**30 * 0.9) - 2**31) / (2 * 24 * 8 * 128 * 2))
    assert f"holds {room:,} of the 16,384 tokens" in plan(80, *lite)[1].text

    def shared(*overrides: str) -> float:
        (one,) = plan(1000, "allocation_mode=lite.d1|d1", "lite.slots=7", "lite.context=2048", *overrides)
        return float(one.text.split()[5])

    # One device for all: beside the trainer the cache, and the weights only if they have another dtype.
    kv_token, alone = 2 * 24 * 8 * 128 * 4, float(plan(1000, "allocation_mode=sglang.d1+d1")[0].text.split()[5])
    assert shared() == pytest.approx(alone + 8 * 2048 * kv_token / 2**30 + 4 + 2, abs=0.02)
    whole = float(plan(1000, "allocation_mode=sglang.d1+d1", "actor.dtype=float32")[0].text.split()[5])
    assert shared("actor.dtype=float32") == pytest.approx(whole + 8 * 2048 * kv_token / 2**30, abs=0.02)

    # A server that sleeps while the trainer computes: each phase must fit, not both together.
    turns = "allocation_mode=sglang.d4|d4"
    step, awake, cache = plan(10, turns)
    assert step.text == f"a trainer rank needs about {needed:.2f} of 10.0 GiB"
    assert (awake.level, awake.text) == (
        "warning",
        "a trainer rank beside its server that is awake needs about 9.00 of 10.0 GiB, most of it its server (5.00)",
    )
    assert "sglang.mem_fraction_static" in awake.fix
    assert f"holds {int((5 * 2**30 - 2**31) / (2 * 24 * 8 * 128 * 2)):,} of" in cache.text
    awake = plan(10, turns, "actor.fsdp.offload_params=true", "sglang.mem_fraction_static=0.7")[1]
    assert awake.text.endswith("awake needs about 7.00 of 10.0 GiB")
    assert awake == plan(10, turns, "actor.fsdp.offload_params=true", "sglang={mem-fraction-static: 0.7}")[1]

    rank, _ = plan(needed + 3.5, "actor.fsdp.reduce_once=true")
    assert rank.level == "problem" and "most of it whole gradients (4.00)" in rank.text
    assert rank.fix == "Set actor.fsdp.reduce_once=false, or t or c instead of p in allocation_mode."
    assert plan(needed / 0.9)[0].level == "warning"
    rank, host, _ = plan(80, "actor.fsdp.offload_params=true")
    assert rank.text == f"a trainer rank needs about {needed - 4:.2f} of 80.0 GiB"
    assert host.text == "the host needs about 16.00 of 32.0 GiB"
    copies = 4 + 2**25 / 2**30  # all state twice, and what is received of a layer's gradient
    options = {"optimizer.type=adam_bf16": -1, "fsdp.dp_replicate=2": copies}
    for option, more in options.items():
        assert plan(80, f"actor.{option}")[0].text == f"a trainer rank needs about {needed + more:.2f} of 80.0 GiB"
    together = needed + 24 * 1024 * layer / 2**30
    rank = plan(80, "actor.mb_spec.max_tokens_per_mb=null", "actor.fsdp.reduce_once=true")[0]
    assert rank.text == f"a trainer rank needs about {together:.2f} of 80.0 GiB", "of one micro-batch nothing is kept"
    assert (
        plan(80, "ref={path: m}", "actor.kl_ctl=0.1")[0].text
        == f"a trainer rank needs about {needed + 1:.2f} of 80.0 GiB"
    )

    teacher = replace(shape, num_parameters=2**31)
    rank = plan(80, "actor.algorithm=opd", "teacher.path=t", teacher=teacher)[0]
    assert rank.text == f"a trainer rank needs about {needed + 2:.2f} of 80.0 GiB"

    # With a reference of its own, twice as large, on 2 workers: the policy's need what they did without it, the others
    # half of 2**31 parameters, what is in no layer, two copies of a block of 2**25 logits, and hidden states.
    apart = ("workers.ref.ranks=2", "ref={path: r}", "actor.kl_ctl=0.1", "sglang.mem_fraction_static=0.9")
    actor, ref, _ = plan(80, *apart, "allocation_mode=sglang.d2+d4", ref=replace(shape, num_parameters=2**31))
    assert actor.text == f"a worker of actor needs about {needed:.2f} of 80.0 GiB"
    alone = 4 + 0.5 + 0.25 + 1024 * 6 * 2048 / 2**30
    assert ref.text == f"a worker of ref needs about {alone:.2f} of 80.0 GiB"
    too_small = plan(alone - 1, *apart, "allocation_mode=sglang.d2+d4", ref=replace(shape, num_parameters=2**31))[1]
    assert too_small.level == "problem" and too_small.fix.startswith("Raise workers.ref.ranks, use a smaller model")

    of_8_answers = 2 + 8 * 1024 * 2 * 24 * 8 * 128 * 2 / 2**30
    assert plan(of_8_answers / 0.5 - 0.01, "sglang.mem_fraction_static=0.5")[1].level == "warning"
    assert plan(of_8_answers / 0.5 + 0.01, "sglang.mem_fraction_static=0.5")[1].level == "ok"
    none = plan(2.1)[1]
    assert none.level == "problem" and "holds 0 of the" in none.text


def test_eight_billion_parameters_on_32_ranks(tmp_path: Path) -> None:
    """Sequences of 32k tokens, checkpointed, in bfloat16: 24.9 GiB of a rank."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    words = ["actor.path=m", "actor.dtype=bfloat16", "actor.gradient_checkpointing=true", "cluster.n_nodes=16"]
    words += ["allocation_mode=sglang.d96+d32", "actor.mb_spec.max_tokens_per_mb=32768", "train_dataset.batch_size=512"]
    config = load_expr_config(["--config", str(tmp_path / "config.yaml"), *words], GRPOConfig)[0]
    (rank,) = needs_of(config, QWEN3_8B, 32768).ranks
    parts = {name: round(size / GIB, 1) for name, size in (rank.state | rank.step).items() if size}
    assert parts == {
        "parameters": 1.0,
        "gradients": 1.0,
        "AdamW moments": 1.9,
        "gathered weights": 3.0,
        "activations": 15.8,
        "output layer": 1.2,
        "gradients to send": 1.1,
    }
    assert sum((rank.state | rank.step).values()) / GIB == pytest.approx(24.9, abs=0.05)
