"""Two processes over gloo must do what one does."""

from collections.abc import Callable
from typing import Any

import pytest
import testing_forks
import torch
import two_rank_program
from training_cases import SPEC, actor_config, of_update, train_config, write_model
from two_rank_program import (
    BATCHES,
    ENGINES,
    LENGTHS,
    LORA,
    PAIR_SHARES,
    PAIRS,
    PPO_RUNS,
    STEADY,
    TRAJECTORIES,
    TRAJECTORY_SHARES,
    critic_run,
    dpo_steps,
    ppo_steps,
    sft_steps,
)

from arealite.api.cli_args import FSDPEngineConfig
from arealite.api.errors import ConfigError
from arealite.api.io_struct import SaveLoadMeta
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.hf_model import iter_full_params
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.utils.fingerprint import fingerprint, model_fingerprint

Start = Callable[..., Any]
pytestmark = pytest.mark.xdist_group("two_ranks")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process finds, and the folders it leaves for two."""
    folder = tmp_path_factory.mktemp("one")
    paths = {name: write_model(folder / name, tie=name == "tied") for name in ("untied", "tied")}
    found: dict[str, Any] = {"paths": paths | {"resumed": str(folder / "resumed")}}
    for name, path in paths.items():
        engine = FSDPEngine(train_config(path, **STEADY))
        engine.initialize(None, SPEC)
        found[name] = sft_steps(engine, BATCHES)
        if name == "tied":
            engine.save(SaveLoadMeta(found["paths"]["resumed"], with_optim=True))
            found["resumed"] = sft_steps(engine, BATCHES)
        engine.destroy()
    engine = FSDPEngine(train_config(paths["tied"], **STEADY, **LORA))
    engine.initialize(None, SPEC)
    found["lora"] = sft_steps(engine, BATCHES)
    found["sent"] = dict(iter_full_params(engine.model, torch.float32))
    engine.destroy()
    for name, (choices, advantage_fn) in PPO_RUNS.items():
        actor = FSDPPPOActor(actor_config(paths["tied"], **STEADY, **choices), advantage_fn=advantage_fn)
        actor.initialize(None, SPEC)
        found[name] = ppo_steps(actor, TRAJECTORIES.clone())
        actor.destroy()
    found["pairs"] = dpo_steps(paths["tied"], [*range(len(PAIRS))])
    (found["critic"],) = critic_run(paths["tied"], TRAJECTORIES.clone())
    return found


@pytest.fixture(scope="module")
def two(one: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each of two processes finds."""
    out = tmp_path_factory.mktemp("two")
    with testing_forks.two_ranks(two_rank_program.main, one["paths"], out) as ranks:
        assert [rank.end() for rank in ranks] == [0, 0]
    return {"out": out, "ranks": [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]}


def assert_params_equal(params: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(params) == set(expected)
    for name in expected:
        # Three steps move a parameter by up to 3e-2; at lr = eps they differ by as much as the gradients: rounding.
        torch.testing.assert_close(params[name], expected[name], atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", ENGINES)
def test_three_steps_on_two_ranks_equal_those_on_one(one: dict[str, Any], two: dict[str, Any], name: str) -> None:
    expected = one["lora" if "lora" in name else ENGINES[name][0]]
    for rank in two["ranks"]:
        assert rank[name]["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert_params_equal(rank[name]["params"], expected["params"])


def test_copies_of_a_model_are_whole_and_saved_as_one(start: Start, one: dict[str, Any], two: dict[str, Any]) -> None:
    whole = two["ranks"][0]["replicated"]["params"]
    expected = model_fingerprint({name: fingerprint(tensor) for name, tensor in whole.items()})
    for rank in two["ranks"]:
        assert rank["replica"]["fingerprint"] == expected
        assert rank["replica"]["shapes"] == {name: tuple(tensor.shape) for name, tensor in whole.items()}
        assert all(torch.equal(tensor, whole[name]) for name, tensor in rank["replicated"]["params"].items())
    engine = start(FSDPEngine(train_config(one["paths"]["tied"], **STEADY)))
    engine.load(SaveLoadMeta(str(two["out"] / "replicated"), with_optim=True))
    assert engine.fingerprint() == expected


def test_a_parameter_is_gathered_to_its_owner_from_the_copy_that_the_owner_shares(two: dict[str, Any]) -> None:
    first, second = (rank["owned"] for rank in two["ranks"])
    assert not set(first) & set(second)
    assert_params_equal(first | second, two["ranks"][0]["replicated"]["params"])


def test_copies_that_ranks_do_not_divide_into_are_refused(one: dict[str, Any]) -> None:
    engine = FSDPEngine(train_config(one["paths"]["tied"], fsdp=FSDPEngineConfig(dp_replicate=3)))
    with pytest.raises(ConfigError, match=r"dp_replicate must divide d of allocation_mode: got 3 and d1"):
        engine.initialize(None, SPEC)


def test_merged_weights_of_two_ranks_are_those_of_one(one: dict[str, Any], two: dict[str, Any]) -> None:
    first, second = (rank["sent"] for rank in two["ranks"])
    assert set(first) == set([*one["sent"]][::2]) and set(second) == set([*one["sent"]][1::2])
    assert_params_equal(first | second, one["sent"])
    (moved, *_) = ((name, one["sent"][name]) for name in one["sent"] if "q_proj" in name)
    assert (one["tied"]["params"][moved[0]] - moved[1]).abs().max() > 1e-2, "all weights were trained there"


def test_an_adapter_that_two_ranks_saved_resumes_on_one(start: Start, one: dict[str, Any], two: dict[str, Any]) -> None:
    engine = start(FSDPEngine(train_config(one["paths"]["tied"], **STEADY, **LORA)))
    engine.load(SaveLoadMeta(str(two["out"] / "lora"), with_optim=True))
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter.full_tensor(), two["ranks"][0]["lora"]["params"][name])
    assert all(state["exp_avg_sq"].full_tensor().abs().sum() > 0 for state in engine.optimizer.state.values())


@pytest.mark.parametrize("name", PAIR_SHARES)
def test_pairs_on_two_ranks_are_learned_as_on_one(one: dict[str, Any], two: dict[str, Any], name: str) -> None:
    for rank in two["ranks"]:
        for found, expected in zip(rank[name]["metrics"], one["pairs"]["metrics"], strict=True):
            assert of_update(found) == pytest.approx(of_update(expected), rel=1e-4, abs=1e-5)
        assert_params_equal(rank[name]["params"], one["pairs"]["params"])


def test_two_ranks_resume_what_one_saved(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one["resumed"]["losses"] != pytest.approx(one["tied"]["losses"], abs=1e-2)
    for rank in two["ranks"]:
        assert rank["resumed"]["losses"] == pytest.approx(one["resumed"]["losses"], abs=1e-5)
        assert_params_equal(rank["resumed"]["params"], one["resumed"]["params"])


def test_one_rank_loads_what_two_saved(start: Start, two: dict[str, Any]) -> None:
    saved = str(two["out"] / "saved")
    engine = start(FSDPEngine(train_config(saved, **STEADY)))
    engine.load(SaveLoadMeta(saved, with_optim=True))
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter.full_tensor(), two["ranks"][0]["saved"][name])
    moments = [engine.optimizer.state[parameter]["exp_avg_sq"] for parameter in engine.model.parameters()]
    assert all(moment.full_tensor().abs().sum() > 0 for moment in moments)


@pytest.mark.parametrize("run", [*PPO_RUNS, "critic"])
def test_ppo_on_two_ranks_equals_one_also_for_torn_groups(one: dict[str, Any], two: dict[str, Any], run: str) -> None:
    for rank, rows in zip(two["ranks"], TRAJECTORY_SHARES):
        torch.testing.assert_close(rank[run]["advantages"], one[run]["advantages"][rows], atol=1e-4, rtol=1e-4)
        for metrics, expected in zip(rank[run]["metrics"], one[run]["metrics"]):
            assert of_update(metrics) == pytest.approx(of_update(expected), abs=1e-4, rel=1e-4)
            flops = metrics.get("perf/model_tflops"), expected.get("perf/model_tflops")
            assert flops[0] == pytest.approx(flops[1], rel=1e-6, abs=0)
            skipped = sum(LENGTHS) - sum(LENGTHS[2:4]) if run == "one live group" else 0
            assert metrics.get("perf/skipped_tokens", 0) == skipped
        assert_params_equal(rank[run]["params"], one[run]["params"])


def test_a_rank_without_trajectories_reports_what_the_others_do(two: dict[str, Any]) -> None:
    for idle, busy in zip(*(rank["idle"]["metrics"] + rank["idle critic"]["metrics"] for rank in two["ranks"])):
        assert idle == pytest.approx(busy)
        assert idle.get("optim/skipped_steps", idle.get("value/skipped_steps")) == 0
        assert "policy/entropy" in idle or "value/clip_ratio" in idle
    for metrics in two["ranks"][0]["idle"]["metrics"]:
        assert (metrics["perf/idle_share"], metrics["perf/idle_share_max"]) == (0.5, 1.0)
        assert metrics["perf/padding_share"] == 3 / 65, "a token that is dropped in each of three minibatches"
    for metrics in two["ranks"][1]["ppo"]["metrics"]:
        assert 0 < metrics["perf/idle_share"] < metrics["perf/idle_share_max"] < 1
        assert metrics["perf/padding_share"] == 1 / 63, "rank 0 has nothing in one minibatch"


@pytest.mark.parametrize("what", ["upload_error", "save_error"])
def test_a_failure_of_rank_0_raises_on_every_rank(two: dict[str, Any], what: str) -> None:
    first, second = (rank[what] for rank in two["ranks"])
    assert second == f"RuntimeError: rank 0 failed: {first}"


def test_a_fingerprint_of_shards_is_that_of_the_whole(two: dict[str, Any]) -> None:
    whole = {name: fingerprint(tensor) for name, tensor in two["ranks"][0]["saved"].items()}
    assert [rank["fingerprint"] for rank in two["ranks"]] == [model_fingerprint(whole)] * 2
    name, tensor = next(iter(two["ranks"][0]["saved"].items()))
    changed = tensor.clone()
    changed.view(torch.int32).view(-1)[-1] ^= 1
    assert model_fingerprint(whole | {name: fingerprint(changed)}) != two["ranks"][0]["fingerprint"]
