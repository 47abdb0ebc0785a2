"""What devices take, worked by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from testing_models import QWEN3_1_7B, QWEN3_8B

from arealite.api.cli_args import GRPOConfig
from arealite.api.errors import ConfigError
from arealite.planner.cost import load_gpu, server_profile, training_s

H100 = load_gpu("h100") | {"train_s": 0.0}


def config(layout: str, **actor: object) -> GRPOConfig:
    found = GRPOConfig(
        experiment_name="e",
        trial_name="t",
        tokenizer_path="m",
        allocation_mode=f"sglang.d8+{layout}",
        cluster={"n_gpus_per_node": 8, "n_nodes": 16},
        train_dataset={"path": "d", "batch_size": 32},
        actor={"path": "m", "dtype": "bfloat16", "gradient_checkpointing": False} | actor,
    )
    found.derive()
    return found


def test_a_server_of_an_h100_costs_what_its_roofline_says() -> None:
    """By hand: 3.44 GB at 75 % of 3.35 TB/s and 0.4 ms; 112 KiB of keys and values per token."""
    server = server_profile(QWEN3_1_7B, load_gpu("h100"), num_gpus=1, slots=256)
    assert server.step_s == pytest.approx(1.3696e-3 + 4e-4, rel=1e-3)
    assert server.sequence_s == pytest.approx(3.163e-6 + 4e-6, rel=1e-3)
    assert server.context_s == pytest.approx(114_688 / 2.5125e12, rel=1e-3)
    assert server.prefill_s == pytest.approx(6.959e-6, rel=1e-3)
    assert server.cache_tokens == pytest.approx(571_600, rel=1e-3)
    two = server_profile(QWEN3_1_7B, load_gpu("h100"), num_gpus=2, slots=256)
    assert two.step_s == pytest.approx(1.3696e-3 / 2 + 4e-4 + 56 * 8e-6, rel=1e-3)


def test_a_token_of_training_costs_its_operations() -> None:
    """By hand: 3.441e9 of parameters and 28 x 2 x 2048 x 4096 of attention, at 40 % of 989 TFLOPS, three times."""
    seconds = training_s(config("d1"), QWEN3_1_7B, H100, num_tokens=1e6, context=4096.0)
    once = (3.44115e9 + 0.469762e9) / 3.956e14
    assert seconds == pytest.approx(1e6 * 3 * once, rel=1e-3)
    recomputed = training_s(config("d1", proximal="recompute"), QWEN3_1_7B, H100, num_tokens=1e6, context=4096.0)
    assert recomputed == pytest.approx(1e6 * 4 * once, rel=1e-3)


def test_ranks_divide_it_and_pay_for_it() -> None:
    def seconds(layout: str, **actor: object) -> float:
        return training_s(config(layout, **actor), QWEN3_8B, H100, num_tokens=2.0**20, context=8192.0)

    one = seconds("d1")
    assert seconds("d8") == pytest.approx(one / 8, rel=1e-6), "a node gathers weights sooner than it computes"
    micro = {"mb_spec": {"max_tokens_per_mb": 2**15}}
    # 8 stages, 32 micro-batches: 7 more times that of one.
    assert seconds("p8", **micro) == pytest.approx(one / 8 * (32 + 7) / 32, rel=1e-6)
    # Over t each layer sums 2 outputs of 4096 values in bfloat16 in each direction: twice 7/8 pass a link of 450 GB/s.
    sums = 2 * 2 * 2 * 7 / 8 * 2**20 * 4096 * 36 * 2 / 4.5e11
    assert seconds("t8") == pytest.approx(one / 8 + sums, rel=1e-6)
    # Micro-batches of 128 tokens wait for 16.4 GB over the network, twice.
    tiny = {"mb_spec": {"max_tokens_per_mb": 128}}
    gathered = 2**20 / 32 / 128 * 2 * QWEN3_8B.num_parameters * 2 * 31 / 32 / 3e10
    assert seconds("d32", **tiny) == pytest.approx(gathered, rel=1e-6)


def test_of_experts_a_token_uses_some() -> None:
    dense = replace(QWEN3_1_7B, mlp=2 * 1024)
    experts = 28 * 16 * 3 * 2048 * 1024
    sparse = replace(dense, num_parameters=dense.num_parameters + experts, expert_parameters=experts, mlp=2 * 1024)
    of_one = server_profile(sparse, H100, num_gpus=1, slots=1)
    used = dense.num_parameters + 28 * 3 * 2048 * 2 * 1024
    assert of_one.prefill_s == pytest.approx(2 * used / (9.89e14 * 0.5), rel=1e-6)
    assert of_one.step_s == pytest.approx(2 * sparse.num_parameters / (3.35e12 * 0.75) + 4e-4, rel=1e-6), "reads all"


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    profile = load_gpu("a100")
    own = tmp_path / "own.yaml"
    own.write_text("".join(f"{key}: {value * 2:.3e}\n" for key, value in profile.items()))
    assert load_gpu(str(own))["bandwidth"] == pytest.approx(2 * 2.04e12)
    own.write_text("bandwidth: 1.0\nflop: 2.0\n")
    with pytest.raises(ConfigError, match=r"must have the keys of a profile and no other: got \['all_reduce"):
        load_gpu(str(own))
    with pytest.raises(ConfigError, match="--gpu must be a100, cpu-2-cores, h100, h200 or a file: got b200"):
        load_gpu("b200")
