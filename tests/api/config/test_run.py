"""What launchers read of a config whose class only the script knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.api.cli_args import (
    BaseExperimentConfig,
    DPOConfig,
    EvalConfig,
    FrozenActorConfig,
    GRPOConfig,
    LoRAConfig,
    PPOActorConfig,
    PPOConfig,
    RWConfig,
    SFTConfig,
    load_expr_config,
)
from arealite.api.config.run import RunConfig, load_run_config
from arealite.api.errors import ConfigError

COMMON = """
experiment_name: e
trial_name: t
train_dataset: {path: data.jsonl, batch_size: 4}
cluster: {n_gpus_per_node: 0}
"""


@pytest.fixture
def load(tmp_path):
    def read(*overrides: str, yaml: str = "", script: str = "") -> BaseExperimentConfig:
        (tmp_path / "config.yaml").write_text(COMMON + yaml)
        (tmp_path / "script.py").write_text(script)
        return load_run_config(["--config", str(tmp_path / "config.yaml"), *overrides], tmp_path / "script.py")

    return read


@pytest.mark.parametrize(
    "overrides, has_servers, trained",
    [
        (["model.path=m", "allocation_mode=d1"], False, "model"),
        (["actor.path=m", "allocation_mode=lite.d2+d1"], True, "actor"),
        (["actor.path=m", "allocation_mode=d1"], False, "actor"),  # e.g. preferences: a policy without rollouts
        (["actor.path=m", "allocation_mode=d1", "gconfig.n_samples=2"], True, "actor"),
        (["actor.path=m", "allocation_mode=d1", "rollout.server_addrs=[h:1]"], True, "actor"),
        (["model.path=m", "allocation_mode=lite.d1+d1"], False, "model"),
        (["tokenizer_path=m", "model.seed=1"], False, "model"),
    ],
)
def test_the_blocks_say_what_runs(load, overrides, has_servers, trained):
    config = load(*overrides)
    key, block = config.trained
    assert (config.rollout is not None, key, block.path, config.tokenizer_path) == (has_servers, trained, "m", "m")


def test_servers_follow_the_allocation_and_the_data(load):
    rollout = load("actor.path=m", "allocation_mode=vllm.d2+d1").rollout
    assert rollout is not None
    assert (rollout.backend, rollout.num_servers, rollout.consumer_batch_size) == ("vllm", 2, 4)


def test_keys_of_the_scripts_own_class_are_left_to_it(load):
    own = "loss: {beta: 0.1}\nactor: {path: m, my_knob: 2}\ncritic: {path: c}\nref: {path: r, my_knob: 2}\n"
    config = load("allocation_mode=lite.d1+d1", yaml=own)
    assert config.actor is not None and config.actor.path == "m" and config.has_reference


@pytest.mark.parametrize(
    "override, message",
    [
        ("launcher.server_restart=1", "Did you mean launcher.server_restarts?"),
        ("rollout.max_head_offpolicynes=1", "Did you mean rollout.max_head_offpolicyness?"),
        ("actor.fsdp.offload_param=true", "Did you mean actor.fsdp.offload_params?"),
        ("actor.eps_clip=2", "actor.eps_clip must be less than 1: got 2"),
        ("recover.mode=auto", "recover must have a trigger"),
        ("rollout.pause_mode=wait", "rollout.pause_mode must be abort or retract or in_place for lite"),
        ("gconfig.max_new_tokens=4096", "lite.context must be greater than max_new_tokens"),
    ],
)
def test_blocks_that_launchers_know_are_judged_before_anything_starts(load, override, message):
    with pytest.raises(ConfigError) as error:
        load("actor.path=m", "allocation_mode=lite.d1+d1", "gconfig.max_new_tokens=64", override)
    assert message in str(error.value)


def test_a_model_must_be_given(load):
    with pytest.raises(ConfigError, match=r"actor\.path or model\.path must be given"):
        load("allocation_mode=d1")


@pytest.mark.parametrize(
    "override, message",
    [
        ("actor.eps_klip=0.3", "Did you mean actor.eps_clip?"),
        ("gconfg.n_samples=2", "Did you mean gconfig?"),
        ("actor.kl_ctl=0.1", "actor.kl_ctl must be 0 without a ref block"),
        ("gconfig.greedy=true", "gconfig.greedy must be false if gconfig.n_samples > 1"),
        ("actor.group_size=3", "actor.group_size must equal gconfig.n_samples"),
        ("train_dataset.type=sft", "train_dataset.type must be rl"),
    ],
)
def test_a_script_that_loads_a_class_of_ours_is_judged_by_it_before_anything_starts(load, override, message):
    script = "config, _ = cli_args.load_expr_config(argv, GRPOConfig)"
    words = ["actor.path=m", "allocation_mode=lite.d1+d1", "gconfig.max_new_tokens=64", "gconfig.n_samples=4"]
    assert isinstance(load(*words, script=script), GRPOConfig)
    with pytest.raises(ConfigError) as error:
        load(*words, override, script=script)
    assert message in str(error.value)
    assert isinstance(load(*words, "my_knob=1", script=script.replace("GRPO", "My")), RunConfig)


@pytest.mark.parametrize(
    ("config", "trained", "has_sampling", "has_reference", "has_critic"),
    [
        (SFTConfig(), "model", False, False, False),
        (RWConfig(), "model", False, False, False),
        (DPOConfig(), "model", False, True, False),
        (GRPOConfig(), "actor", True, False, False),
        (GRPOConfig(ref=FrozenActorConfig()), "actor", True, True, False),
        (PPOConfig(), "actor", True, False, True),
        (EvalConfig(), "model", True, False, False),
        (RunConfig(actor=PPOActorConfig(), ref={}), "actor", False, True, False),
    ],
)
def test_the_blocks_tell_what_is_trained_and_held(
    config: BaseExperimentConfig, trained: str, has_sampling: bool, has_reference: bool, has_critic: bool
) -> None:
    assert config.trained == (trained, getattr(config, trained))
    blocks = (config.sampling is not None, config.has_reference, config.has_critic)
    assert blocks == (has_sampling, has_reference, has_critic)


@pytest.mark.parametrize("config", [DPOConfig(), GRPOConfig(ref=FrozenActorConfig())])
def test_a_reference_that_a_policy_with_adapters_contains_is_none(config: BaseExperimentConfig) -> None:
    config.trained[1].lora = LoRAConfig()
    assert not config.has_reference


class Judged(GRPOConfig):
    """A class of a script, whose key `critic` is no block of ours."""

    critic: str = "http://judge"


class Acted(SFTConfig):
    """A class of a script, whose key `actor` is no block of ours."""

    actor: str = "Hamlet"


def test_keys_of_a_script_that_only_bear_the_name_of_a_block_are_none(tmp_path: Path) -> None:
    assert Acted().trained[0] == "model"
    (tmp_path / "config.yaml").write_text(COMMON)
    words = ["--config", str(tmp_path / "config.yaml"), "actor.path=m", "gconfig.n_samples=4"]
    assert not load_expr_config(words, Judged)[0].has_critic  # and its actor needs no baseline of a critic
