"""The closed form of a step, against the simulator and against sums that are known."""

from dataclasses import replace

import pytest
from testing_models import QWEN3_1_7B, QWEN3_8B, QWEN_1_5B
from testing_simulated import lognormal_lengths

from arealite.api.cli_args import GRPOConfig
from arealite.planner.cost import estimated, load_gpu, lognormal, scenario
from arealite.planner.memory import ModelShape
from arealite.planner.predict import moments, predict
from arealite.planner.scenario import Scenario, ServerProfile
from arealite.simulate.run import simulate

Setting = tuple[ModelShape, str, int, int, int]
SETTINGS: dict[Setting, float] = {
    (QWEN3_1_7B, "sglang.d7+d1", 32, 1, 64): 285.13,
    (QWEN3_1_7B, "sglang.d57+d7", 128, 1, 256): 187.3,
    (QWEN3_1_7B, "sglang.d57+d7", 128, 2, 384): 137.4,
    (QWEN3_1_7B, "sglang.d57+d7", 128, 2, 128): 145.18,
    (QWEN3_1_7B, "sglang.d48+d16", 128, 2, 384): 145.0,
    (QWEN3_8B, "sglang.d12t4+d16", 128, 2, 256): 207.75,
    (QWEN_1_5B, "sglang.d96+d32", 512, 0, 512): 226.45,
    (QWEN_1_5B, "sglang.d96+d32", 512, 1, 1024): 124.02,
    (QWEN_1_5B, "sglang.d96+d32", 512, 2, 1536): 93.2,
    (QWEN_1_5B, "sglang.d96+d32", 512, 4, 2048): 92.79,
    (QWEN3_8B, "sglang.d96t4+d128", 1024, 2, 2048): 206.67,
    (QWEN3_8B, "sglang.d24t4+d32", 256, 4, 1024): 206.96,
}
"""Model, allocation, prompts of a batch, bound, and episodes at once; and the seconds of a simulated step."""


def asked(setting: Setting, num_steps: int = 10) -> Scenario:
    """Return a run on H100s with 16 completions of 8,192 tokens on average, at most 31,744, for each prompt."""
    shape, mode, batch, bound, concurrency = setting
    rollout = {"max_head_offpolicyness": bound, "max_concurrent_rollouts": concurrency}
    config = GRPOConfig(
        experiment_name="e",
        trial_name="t",
        tokenizer_path="m",
        allocation_mode=mode,
        actor={"path": "m", "gradient_checkpointing": True},
        cluster={"n_gpus_per_node": 8, "n_nodes": 64},
        train_dataset={"path": "d", "batch_size": batch},
        gconfig={"n_samples": 16, "max_new_tokens": 31744},
        rollout=rollout | {"episode_timeout": 1e5, "request_timeout": 1e5, "weight_update_timeout": 600.0},
    )
    config.derive()
    costs = estimated(config, shape, load_gpu("h100"), lognormal((512.0, 8192.0, 0.9), 1))
    return scenario(config, costs, steps=num_steps, warm_up=bound + 2, seed=1)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting[1:])))
def test_a_step_is_within_a_fifth_of_the_simulated_one(setting: Setting) -> None:
    assert predict(asked(setting)).step_s == pytest.approx(SETTINGS[setting], rel=0.2)


@pytest.mark.slow
def test_a_simulated_step_is_what_it_was() -> None:
    setting = (QWEN3_1_7B, "sglang.d7+d1", 32, 1, 64)
    result = simulate(asked(setting, 20))
    assert result.seconds / len(result.moments) == pytest.approx(SETTINGS[setting], rel=0.01)


SERVER = ServerProfile(step_s=0.01, sequence_s=1e-3, context_s=0.0, prefill_s=0.0, swap_s=0.0, bytes_per_s=1e30)
EQUAL = Scenario(
    num_servers=1,
    server=SERVER,
    batch_size=4,
    group=2,
    bound=0,
    lengths=lognormal_lengths(100, 0.0, 100),
    max_new_tokens=100,
    train_s=1.0,
    train_token_s=0.0,
)


def test_equal_lengths_by_hand() -> None:
    """8 sequences of 100 tokens on one server: 100 steps of 10 + 8 ms, then a second of training."""
    step = predict(EQUAL)
    assert step.step_s == pytest.approx(100 * 0.018 + 1.0)
    assert (step.num_tokens, step.train_s) == (8 * 108, 1.0) and step.publish_s == pytest.approx(0.0)
    ahead = replace(EQUAL, bound=1)
    result = simulate(ahead)
    assert predict(ahead).step_s == pytest.approx(result.seconds / len(result.moments), rel=0.1)
    assert predict(replace(EQUAL, bound=1, train_s=5.0)).step_s == pytest.approx(5.0)
    half = replace(EQUAL, server=replace(SERVER, slots=4))
    assert predict(half).step_s == pytest.approx(2 * 1.0 + 8 * 0.1 + 1.0), "two waves, as 4 run at once"


def test_a_larger_bound_is_never_slower_and_longer_tails_never_faster() -> None:
    long = replace(EQUAL, lengths=lognormal_lengths(100, 1.0, 800), max_new_tokens=800, num_servers=2)
    steps = [predict(replace(long, bound=bound)).step_s for bound in (0, 1, 2, 4, 8)]
    assert steps == sorted(steps, reverse=True)
    assert predict(replace(EQUAL, num_servers=2)).step_s < steps[0]
    assert "stragglers" in predict(replace(long, bound=1)).floors


def test_moments_of_equal_and_of_drawn_lengths() -> None:
    assert moments(EQUAL).powers == (100.0, 1e4, 1e6, 1e8) and moments(EQUAL).longest_of_batch == 100.0
    drawn = moments(replace(EQUAL, lengths=lognormal_lengths(100, 0.5, 10_000), max_new_tokens=10_000))
    assert drawn.powers[0] == pytest.approx(100, rel=0.05)
    assert drawn.powers[0] < drawn.longest_of_group < drawn.longest_of_batch
