"""Loading configs: what loads and to which values, and the message of every mistake."""

import dataclasses
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from arealite.api.cli_args import (
    DPOConfig,
    FrozenActorConfig,
    GenerationHyperparameters,
    GRPOConfig,
    OptimizerConfig,
    PPOActorConfig,
    PPOConfig,
    RWConfig,
    SFTConfig,
    config_help,
    load_expr_config,
    to_yaml,
)
from arealite.api.config.types import config_keys
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder

CONFIGS = Path(__file__).parents[2] / "examples/arealite/configs"

MINIMAL = """
experiment_name: e
trial_name: t
actor: {path: model, ppo_n_minibatches: 1}
train_dataset: {path: gsm8k, batch_size: 8}
"""

DOCUMENTED = """
tokenizer_path: Qwen/Qwen3-1.7B
train_dataset:
  path: hf-dataset://inclusionAI/AReaL-RL-Data/data/train.jsonl
  batch_size: 32
rollout:
  server_address: http://localhost:30000
  timeout: 60
actor:
  lr: 1e-5
  eps_clip: 0.2
"""

ORIGINAL = (Path(__file__).parent / "originals/v03.yaml").read_text()

OLD_KEYS = """
actor.backend actor.ds_auto_tp actor.init_critic_from_actor actor.optimizer.hysteresis
actor.optimizer.initial_loss_scale actor.optimizer.loss_scale_window actor.optimizer.min_loss_scale
actor.optimizer.offload checkpointer cluster.name_resolve cluster.cluster_name ref.backend
rollout.enable_rollout_tracing rollout.schedule_policy server_only stats_logger.swanlab.api_key
total_train_n_seqs train_dataset.num_workers train_dataset.pin_memory
valid_dataset.pin_memory valid_dataset.reward_fn
"""


def load(directory: Path, text: str, *overrides: str, cls: type = GRPOConfig, **options: Any) -> Any:
    """Load a config from text."""
    file = directory / "config.yaml"
    file.write_text(text)
    return load_expr_config(["--config", str(file), *overrides], cls, **options)[0]


def refusal(directory: Path, text: str, *overrides: str, cls: type = GRPOConfig) -> str:
    """Return the message of a refusal."""
    with pytest.raises(ConfigError) as caught:
        load(directory, text, *overrides, cls=cls)
    return str(caught.value)


def test_minimal_config_is_filled_in(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "gconfig.n_samples=4", "gconfig.max_new_tokens=77", "gconfig.temperature=0.7")
    assert config.tokenizer_path == "model"
    assert (config.rollout.consumer_batch_size, config.rollout.experiment_name) == (8, "e")
    assert (config.actor.group_size, config.actor.temperature, config.actor.optimizer) == (4, 0.7, OptimizerConfig())
    assert config.eval_gconfig == GenerationHyperparameters(greedy=True, max_new_tokens=77, temperature=0.7)
    for block in (config.saver, config.evaluator, config.stats_logger, config.rollout):
        assert (block.experiment_name, block.trial_name, block.fileroot) == ("e", "t", os.path.abspath("runs"))
    assert config.ref is None and config.valid_dataset is None


def test_filled_in_keys_follow_overrides_unless_given(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "seed=5", "actor.seed=6", "rollout.consumer_batch_size=3", "valid_dataset={}")
    assert (config.rollout.seed, config.actor.seed) == (5, 6)
    assert (config.rollout.consumer_batch_size, config.train_dataset.batch_size) == (3, 8)
    assert config.valid_dataset.path == "gsm8k"


def test_the_stored_config_of_a_run_under_another_name_has_that_name_in_every_block(tmp_path: Path) -> None:
    """Else the new run would resume the old one's checkpoint, or move its folder away."""
    config = load(tmp_path, MINIMAL)
    (tmp_path / "stored.yaml").write_text(to_yaml(config))
    argv = ["--config", str(tmp_path / "stored.yaml"), "trial_name=again"]
    again, _ = load_expr_config([*argv, f"cluster.fileroot={tmp_path}"], GRPOConfig)
    blocks = (again.rollout, again.recover, again.saver, again.stats_logger, again.evaluator)
    assert {RunFolder(block).path for block in blocks} == {tmp_path / config.experiment_name / "again"}
    assert again.actor.trial_name == "again"
    named, _ = load_expr_config([*argv, "actor.trial_name=other"], GRPOConfig)
    assert (named.actor.trial_name, named.rollout.trial_name) == ("other", "again")


def test_reference_block_follows_actor(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "ref={}", "actor.dtype=float32", "actor.mb_spec.n_mbs=3", "actor.kl_ctl=0.1")
    assert isinstance(config.ref, FrozenActorConfig)
    assert (config.ref.path, config.ref.dtype, config.ref.mb_spec.n_mbs) == ("model", "float32", 3)
    assert config.ref.optimizer is None


def test_references_reach_defaults_and_the_command_line_wins(tmp_path: Path) -> None:
    text = MINIMAL + "total_train_steps: ${rollout.request_retries}\nseed: 2\n"
    config = load(tmp_path, text, "seed=${total_train_steps}")
    assert (config.total_train_steps, config.seed, config.actor.seed) == (3, 3, 3)


def test_a_block_may_refer_to_another(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "valid_dataset=${train_dataset}")
    assert (config.valid_dataset.path, config.valid_dataset.type) == ("gsm8k", "rl")


@pytest.mark.parametrize("text", ["1e-5", "'1e-5'", "0.00001", "1.0e-05"])
def test_numbers_in_all_spellings(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, MINIMAL, f"actor.optimizer.lr={text}").actor.optimizer.lr == 1e-5
    assert load(tmp_path, MINIMAL + f"eval_gconfig: {{temperature: {text}}}").eval_gconfig.temperature == 1e-5


def test_names_may_be_numbers(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL, "trial_name=0").saver.trial_name == "0"


def test_synchronous_training_is_a_bound_of_zero(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL, "rollout.max_head_offpolicyness=4").rollout.max_head_offpolicyness == 4
    config = load(tmp_path, MINIMAL, "rollout.max_head_offpolicyness=4", "async_training=false")
    assert config.rollout.max_head_offpolicyness == 0


def test_allocation_names_the_backend(tmp_path: Path) -> None:
    cpu = ("cluster.n_gpus_per_node=0", "gconfig.max_new_tokens=64")
    assert load(tmp_path, MINIMAL, "allocation_mode=lite.d2+d1", *cpu).rollout.backend == "lite"
    assert load(tmp_path, MINIMAL, "allocation_mode=sglang.d2+d1", *cpu).rollout.backend == "sglang"
    assert load(tmp_path, MINIMAL, "allocation_mode=vllm.d2+d1", *cpu).rollout.backend == "vllm"
    assert load(tmp_path, MINIMAL, "allocation_mode=d1", "rollout.backend=lite", *cpu).rollout.backend == "lite"


def test_what_servers_do_differently_is_refused(tmp_path: Path) -> None:
    def vllm(*overrides: str) -> Any:
        return load(tmp_path, MINIMAL, "rollout.backend=vllm", *overrides)

    stops = ("eval_gconfig.stop=[x]", "eval_gconfig.min_new_tokens=3")
    assert vllm("gconfig.top_k=5", "gconfig.top_p=0.9", *stops, "rollout.pause_mode=wait").gconfig.top_k == 5
    assert "at most 2 for vllm: got 2.5" in refusal(
        tmp_path, MINIMAL, "rollout.backend=vllm", "gconfig.temperature=2.5"
    )
    assert "got wait" in refusal(tmp_path, MINIMAL, "rollout.backend=sglang", "rollout.pause_mode=wait")
    assert "got wait" in refusal(tmp_path, MINIMAL, "rollout.backend=lite", "rollout.pause_mode=wait")
    assert "eval_gconfig.min_new_tokens" in refusal(tmp_path, MINIMAL, "rollout.backend=sglang", *stops)


@pytest.mark.parametrize(
    ("cls", "overrides", "message"),
    [
        (
            GRPOConfig,
            ("activation_offloading=true", "gradient_checkpointing=false"),
            "without X.gradient_checkpointing",
        ),
        (GRPOConfig, ("activation_offloading=true",), "false on CPUs: got true and cluster.n_gpus_per_node=0"),
        (GRPOConfig, ("fsdp.dp_replicate=2",), "must divide d of the trainer: got 2 and d3p1t1"),
        (
            SFTConfig,
            ("optimizer.type=adam_bf16", "optimizer.beta2=0.999"),
            "at most 0.99 with type adam_bf16: got 0.9 ",
        ),
    ],
)
def test_options_without_effect_are_refused(
    tmp_path: Path, cls: type, overrides: tuple[str, ...], message: str
) -> None:
    key = "actor" if cls is GRPOConfig else "model"
    text = MINIMAL if key == "actor" else MINIMAL.replace("actor", "model").replace(", ppo_n_minibatches: 1", "")
    mode = "lite.d1+d3" if key == "actor" else "d3"
    common = ("cluster.n_gpus_per_node=0", f"allocation_mode={mode}")
    if key == "actor":
        common += ("gconfig.max_new_tokens=64",)
    load(tmp_path, text, *common, cls=cls)
    given = [f"{key}.{override}" for override in overrides]
    assert message.replace("X", key) in refusal(tmp_path, text, *common, *given, cls=cls)


def test_models_of_a_run_share_options_of_speed(tmp_path: Path) -> None:
    options = ("actor.torch_compile=true", "actor.cast_lm_head_to_fp32=true", "actor.fsdp.dp_replicate=2")
    config = load(tmp_path, MINIMAL, *options, "ref={}", "actor.kl_ctl=0.1")
    assert (config.ref.torch_compile, config.ref.cast_lm_head_to_fp32, config.ref.fsdp.dp_replicate) == (True, True, 2)


def test_server_addresses(tmp_path: Path) -> None:
    for value in ("[http://a:1/,b:2]", "'a:1,http://b:2'", "a:1,b:2"):
        assert load(tmp_path, MINIMAL, f"rollout.server_addrs={value}").rollout.server_addrs == ["a:1", "b:2"]


def test_others_servers_need_none_of_our_gpus(tmp_path: Path) -> None:
    overrides = ("allocation_mode=sglang.d8+d8", "rollout.server_addrs=a:1")
    assert load(tmp_path, MINIMAL, *overrides).allocation.gen.world_size == 8
    assert "needs 16 GPUs" in refusal(tmp_path, MINIMAL, overrides[0])


def test_loading_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load(tmp_path, MINIMAL, "cluster.fileroot=~/runs")
    assert config.saver.fileroot == str(tmp_path / "runs")
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_resolved_yaml_loads_to_the_same_config(tmp_path: Path) -> None:
    for text, cls in (
        (MINIMAL, GRPOConfig),
        (MINIMAL.replace("actor", "model").replace(", ppo_n_minibatches: 1", ""), SFTConfig),
    ):
        config = load(tmp_path, text, cls=cls)
        assert load(tmp_path, to_yaml(config), cls=cls) == config


@given(
    st.floats(0, 1, exclude_min=True),
    st.integers(1, 10**9),
    st.text(min_size=1, max_size=8).filter(lambda text: text.isprintable() and "${" not in text and text != "???"),
)
@example(0.1, 1, "1e3")
@settings(max_examples=settings.default.max_examples // 10)
def test_values_survive_the_round_trip(lr: float, steps: int, note: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = yaml.safe_load(MINIMAL)
        tree["actor"]["optimizer"] = {"lr": lr}
        tree |= {"total_train_steps": steps, "stats_logger": {"wandb": {"notes": note}}, "gconfig": {"stop": [note]}}
        config = load(Path(folder), OmegaConf.to_yaml(OmegaConf.create(tree)))
        assert (config.actor.optimizer.lr, config.total_train_steps) == (lr, steps)
        assert config.stats_logger.wandb["notes"] == note and config.eval_gconfig.stop == [note]
        assert load(Path(folder), to_yaml(config)) == config


_CHOSEN = [
    f"actor.{name}"
    for name in (
        *("group_reward_norm", "mask_no_eos_with_zero", "recompute_logprob", "use_decoupled_loss"),
        "behav_imp_weight_cap",
    )
]


def test_original_yaml_loads_with_one_warning_per_old_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="arealite.config"):
        config = load(tmp_path, ORIGINAL)
    warned = [record.getMessage().split(" ")[0] for record in caplog.records]
    assert sorted(warned) == sorted([*OLD_KEYS.split(), *_CHOSEN, "ref"]), "its reference has no effect: kl_ctl is 0"
    valid = config.valid_dataset
    assert (valid.batch_size, valid.shuffle, valid.drop_last) == (256, True, True), "scripts of the original read them"
    assert config.sglang == {
        "model_path": "Qwen/Qwen2-1.5B-Instruct",
        "random_seed": 1,
        "dtype": "bfloat16",
        "schedule_policy": "lpm",
    }
    assert config.actor.optimizer.eps == 1e-8 and config.ref.mb_spec.max_tokens_per_mb == 1060


def test_a_key_with_dots_is_not_lost(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL + "actor.eps_clip: 0.3\n")
    assert (
        "actor.eps_clip must stand in its block: got it with dots in" in message
        and "Write eps_clip under actor." in message
    )


def test_name_resolve_is_no_longer_configured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(tmp_path, MINIMAL, "cluster.name_resolve.type=redis", "cluster.name_resolve.redis_addr=h:1")
    load(tmp_path, MINIMAL, "rollout.name_resolve.etcd3_addr=h:2")
    message = "has no effect: the run itself is the registry of its servers. Remove it."
    assert caplog.messages == [f"cluster.name_resolve {message}", f"rollout.name_resolve {message}"]


@pytest.mark.parametrize(
    "override",
    [
        *("stats_logger.wandb=null", "stats_logger.trackio=null", "sglang=null", "launcher.slurm=null"),
        *("gconfig.stop=null", "eval_gconfig.stop=null", "train_dataset.type=null"),
    ],
)
def test_empty_blocks_and_nulls_of_the_original_are_the_defaults(tmp_path: Path, override: str) -> None:
    assert load(tmp_path, MINIMAL, override) == load(tmp_path, MINIMAL)


def test_old_keys_are_not_looked_for_among_the_options_of_other_programs(tmp_path: Path) -> None:
    options = {"backend": "x", "optimizer": {"offload": True}}
    overrides = ("sglang.backend=x", "sglang.optimizer.offload=true", "stats_logger.wandb.backend=x")
    config = load(tmp_path, MINIMAL, *overrides)
    assert config.sglang == options and config.stats_logger.wandb["backend"] == "x"
    message = refusal(tmp_path, MINIMAL, "stats_logger.swanlab.api_key=s3cr3t")
    assert "stats_logger.swanlab.api_key must be None: got another value. Remove it: secrets stay" in message
    assert "s3cr3t" not in message


def test_truncation_has_a_finite_top_k_and_servers_that_return_what_they_kept(tmp_path: Path) -> None:
    def sampling(*overrides: str) -> tuple[int, int]:
        config = load(tmp_path, MINIMAL, *overrides)
        return config.gconfig.top_k, config.eval_gconfig.top_k

    everything = 100_000_000
    for backend in ("lite", "sglang", "vllm"):
        chosen = (f"rollout.backend={backend}", "gconfig.max_new_tokens=64")
        assert sampling(*chosen) == (everything, everything)
        assert sampling(*chosen, "gconfig.top_p=0.9") == (512, everything), "an evaluation needs no kept sets"
        assert sampling(*chosen, "gconfig.min_p=0.05") == (512, everything)
        assert sampling(*chosen, "gconfig.top_p=0.9", "gconfig.top_k=20") == (20, 20)
        assert sampling(*chosen, "eval_gconfig.top_k=5", "eval_gconfig.min_new_tokens=2") == (everything, 5)
        for override, rule in (
            ("gconfig.top_k=1", "gconfig.top_k must be at least 2 in training: got 1"),
            ("gconfig.min_new_tokens=2", "gconfig.min_new_tokens must be 0 in training: got 2"),
        ):
            assert rule in refusal(tmp_path, MINIMAL, *chosen, override)
    sglang = refusal(tmp_path, MINIMAL, "rollout.backend=sglang", "gconfig.top_k=5000")
    assert "gconfig.top_k must be at most 4096 for sglang in training: got 5000" in sglang
    cpu = ("cluster.n_gpus_per_node=0", "rollout.backend=vllm", "gconfig.top_k=20")
    assert "for vllm on CPUs: got 1, 20 and 0" in refusal(tmp_path, MINIMAL, *cpu)
    assert sampling(*cpu, "rollout.server_addrs=[a:1]")[0] == 20, "others' servers may have GPUs"


def test_documented_names_move_to_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    overrides = ("experiment_name=my_experiment", "trial_name=my_trial")
    assert load(tmp_path, DOCUMENTED, *overrides).actor.path == "Qwen/Qwen3-1.7B"
    caplog.clear()
    config = load(tmp_path, DOCUMENTED, *overrides, "actor.path=m", "actor.lr=3e-5")
    assert config.actor.path == "m"
    assert config.actor.optimizer.lr == 3e-5
    assert config.rollout.server_addrs == ["localhost:30000"] and config.rollout.request_timeout == 60
    assert config.tokenizer_path == "Qwen/Qwen3-1.7B"
    assert {record.getMessage() for record in caplog.records} == {
        "actor.lr is now actor.optimizer.lr=1e-05. Rename it.",
        "actor.lr is now actor.optimizer.lr=3e-05. Rename it.",
        "rollout.server_address is now rollout.server_addrs=http://localhost:30000. Rename it.",
        "rollout.timeout is now rollout.request_timeout=60. Rename it.",
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=yes", "seed must be a valid integer: got True. Change it on the command line."),
        ("actor.optimizer.lr=true", "actor.optimizer.lr must be a number, not true or false: got True."),
        ("actor.optimizer.lr=fast", "actor.optimizer.lr must be a valid number, unable to parse string as a number:"),
        ("actor.reward_clip=.inf", "actor.reward_clip must be a finite number: got inf."),
        ("actor.eps_clip=1", "actor.eps_clip must be less than 1: got 1."),
        ("actor.optimizer.warmup_steps_proportion=1.1", "actor.optimizer.warmup_steps_proportion must be less than or"),
        ("gconfig.stop=a", "gconfig.stop must be a valid list: got 'a'."),
        ("rollout.server_addrs=a", "rollout.server_addrs must be host:port or http://host:port: got 'a'."),
        ("rollout.server_addrs=a:99999", "rollout.server_addrs must be host:port or http://host:port: got 'a:99999'."),
        ("launcher.trainer_env_vars=A", "launcher.trainer_env_vars must be written as A=1,B=2: got 'A'."),
        ("trial_name=a/b", "trial_name must be made of letters"),
        ("trial_name=..", "trial_name must be made of letters"),
        ("cluster.fileroot=''", "cluster.fileroot must be the path of a folder: got ''."),
        ("sglang=[1]", "sglang must be a block of any keys: got [1] on the command line."),
        ("actor.path.x=2", "actor.path must be text: got {'x': 2} on the command line."),
        ("gconfig.stop[0]=a", "gconfig.stop must be a list of text: got {'0': 'a'} on the command line."),
        ("actor=${nope}", "must refer to keys that exist: got Interpolation key 'nope' not found."),
        ("tokenizer_path=${tokenizer_path}", "tokenizer_path must refer to keys that exist: got Recursive"),
        ("seed=${seed", "overrides must be key=value with a YAML value: got 'seed=${seed'."),
        ("recover.mode=always", "recover.mode must be 'disabled', 'auto', 'fault' or 'resume': got 'always'."),
        ("agent.online.port=65536", "agent.online.port must be less than or equal to 65535: got 65536."),
        ("stats_logger.wandb.mode=ofline", "wandb.mode must be one of disabled, online, offline, shared: got ofline"),
        ("server_only=true", "server_only must be False: got True. Remove it: allocation_mode alone says it"),
        ("gconfig.frequency_penalty=0.5", "gconfig.frequency_penalty must be 0: got 0.5."),
        ("sgalng.x=1", "sgalng must be a key of GRPOConfig: got it on the command line. Did you mean sglang?"),
        ("allocation_mode=sglang.d1p2+d1", "rollout.weight_update must be disk if servers have p > 1"),
        ("gconfig.min_new_tokens=20000", "gconfig.min_new_tokens must be at most gconfig.max_new_tokens"),
        ("actor.temperature=0.5", "actor.temperature must equal gconfig.temperature: got 0.5 and 1.0."),
        ("actor.ppo_n_minibatches=9", "actor.ppo_n_minibatches must be at most rollout.consumer_batch_size: got 9 and"),
        ("actor.optimizer=null", "actor.optimizer must be a block: got null."),
        ("ref.optimizer.lr=0.1", "ref.optimizer must be null"),
        ("actor.lora.dropout=0.1", "actor.lora.dropout must be 0 where actor.disable_dropout is true: got 0.1."),
        ("actor.lora_r=8", "actor.lora_r must be a key of GRPOConfig: got it on the command line"),
    ],
)
def test_mistakes_name_key_value_and_fix(tmp_path: Path, override: str, message: str) -> None:
    assert message in refusal(tmp_path, MINIMAL, override)


def test_pairs_given_together(tmp_path: Path) -> None:
    assert "rollout.backend must agree with allocation_mode" in refusal(
        tmp_path, MINIMAL, "rollout.backend=lite", "allocation_mode=sglang.d4+d4"
    )
    greedy = refusal(tmp_path, MINIMAL, "gconfig.greedy=true", "gconfig.n_samples=2")
    assert "gconfig.greedy must be false if gconfig.n_samples > 1" in greedy
    gpus = "cluster.n_gpus_per_node=64"
    for sizes, letter in (("d2t2", "t"), ("d2p2", "p")):
        lora = refusal(tmp_path, MINIMAL, f"allocation_mode=sglang.d4+{sizes}", "actor.lora.rank=4", gpus)
        assert f"{letter} of the trainer must be 1 with actor.lora: got " in lora
        assert f"Write {letter}1 and d4 in allocation_mode, or remove actor.lora." in lora
    compiled = refusal(tmp_path, MINIMAL, "allocation_mode=sglang.d4+d2t2", "actor.torch_compile=true", gpus)
    assert "t of the trainer must be 1 with actor.torch_compile: got d2p1t2." in compiled
    other = refusal(tmp_path, MINIMAL, "allocation_mode=sglang.d4+d2t2", "actor.parallel=d4", gpus)
    assert "actor.parallel must be what allocation_mode gives the trainer: got d4p1t1 and d2p1t2. Remove it." in other
    copies = refusal(tmp_path, MINIMAL, "allocation_mode=sglang.d4+d2t2", "actor.fsdp.dp_replicate=4", gpus)
    assert "actor.fsdp.dp_replicate must divide d of the trainer: got 4 and d2p1t2." in copies
    many = refusal(tmp_path, MINIMAL, "allocation_mode=sglang.d4+d2", "rollout.weight_update_senders=3")
    assert "rollout.weight_update_senders must be at most the trainer's ranks: got 3 of 2. Lower it." in many
    none = refusal(tmp_path, MINIMAL, "rollout.weight_update=disk", "rollout.weight_update_senders=1")
    assert "rollout.weight_update_senders must be left out with rollout.weight_update=disk: got 1." in none


def test_only_an_allocation_lets_servers_sleep(tmp_path: Path) -> None:
    for mode in (["allocation_mode=sglang.d1+d1"], []):
        assert not load(tmp_path, MINIMAL, *mode, "rollout.servers_sleep=true").rollout.servers_sleep
    assert load(tmp_path, MINIMAL, "allocation_mode=sglang.d1|d1").rollout.servers_sleep


def test_an_old_and_a_new_name_of_a_key_are_refused_together(tmp_path: Path) -> None:
    twice = refusal(tmp_path, MINIMAL, "actor.lr=1", "actor.optimizer.lr=2")
    assert "actor.optimizer.lr must be given once: got it as actor.lr too." in twice
    followed = refusal(tmp_path, MINIMAL, "actor.optimizer=${ref.optimizer}", "actor.lr=3e-5")
    assert "actor.optimizer.lr must stand in a block: got optimizer='${ref.optimizer}' and actor.lr." in followed


def test_a_fault_is_told_once_and_all_faults_are_told(tmp_path: Path) -> None:
    lines = refusal(tmp_path, MINIMAL, "seed=-1", "actor.eps_clip=0").split("\n")
    assert [line.split(" ")[0] for line in lines] == ["seed", "actor.eps_clip"]


def test_a_file_may_leave_to_the_command_what_has_a_default(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL + "rollout:\n  backend: ???\n").rollout.backend == "sglang"
    assert load(tmp_path, MINIMAL, "actor.path=???").actor.path == "model"


@pytest.mark.parametrize("key", ["experiment_name", "trial_name", "actor.path", "train_dataset.path"])
def test_keys_that_must_be_given(tmp_path: Path, key: str) -> None:
    tree = yaml.safe_load(MINIMAL)
    *parents, name = key.split(".")
    del (tree[parents[0]] if parents else tree)[name]
    message = refusal(tmp_path, yaml.safe_dump(tree))
    assert message.startswith(f"{key} must be given: got nothing.") and f"{key}=..." in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "must be a YAML file"),
        ("seed: 1\nseed: 2", "must be a YAML file"),
        (f"seed: {'9' * 5000}", "must be a YAML file: got Exceeds the limit"),
        ("- a", "at the top level"),
        ("5", "must"),
    ],
    ids=["cut", "twice", "number", "list", "scalar"],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


def test_the_file_must_be_named_and_exist(tmp_path: Path) -> None:
    for argv, message in (([], "--config must be given"), (["--config"], "--config must be given")):
        with pytest.raises(ConfigError, match=message):
            load_expr_config(argv, GRPOConfig)
    with pytest.raises(ConfigError, match="does not exist"):
        load_expr_config([f"--config={tmp_path}/no.yaml"], GRPOConfig)


class CustomConfig(GRPOConfig):
    """A user's own config."""

    curriculum: float = 0.5
    """Share of easy prompts."""


def test_own_config_classes(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL, "curriculum=0.1", cls=CustomConfig).curriculum == 0.1
    assert "curriculum must be a key of GRPOConfig" in refusal(tmp_path, MINIMAL, "curriculum=0.1")
    config = load(tmp_path, MINIMAL + "mine: {a: 3}\n", "curriculum=0.1", "seed=${mine.a}", ignore_unknown=True)
    assert config.seed == 3


def test_a_config_class_that_is_also_a_dataclass_is_refused(tmp_path: Path) -> None:
    decorated = dataclasses.dataclass(type("Own", (GRPOConfig,), {}))
    assert "Own must be a plain class: got a dataclass. Remove @dataclass" in refusal(tmp_path, MINIMAL, cls=decorated)


class BlocksConfig(SFTConfig):
    """A user's own config, with a policy for which it has no `gconfig`."""

    policy: PPOActorConfig = PPOActorConfig()
    """Another model."""


def test_blocks_of_own_classes_follow_their_run(tmp_path: Path) -> None:
    sft = "experiment_name: e\ntrial_name: t\nmodel: {path: m}\ntrain_dataset: {path: d}\n"
    policy = load(tmp_path, sft, "policy.path=p", "seed=7", cls=BlocksConfig).policy
    assert (policy.experiment_name, policy.seed, policy.group_size) == ("e", 7, 1)
    assert load(tmp_path, sft, "policy={path: p, seed: 3}", "seed=7", cls=BlocksConfig).policy.seed == 3


def test_help_explains_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert "actor.c_clip (number or null; default None)\n    Dual clipping" in config_help(GRPOConfig)
    assert "actor.adv_norm (true or false or null; default None)" in config_help(GRPOConfig)
    assert "train_dataset.type (sft or rl or dpo or rw; default 'sft')" in config_help(SFTConfig)
    with pytest.raises(SystemExit) as stopped:
        load_expr_config(["--help"], GRPOConfig)
    assert stopped.value.code == 0
    assert "actor.path (text; must be given)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("actor.lora.r", ["actor.lora.rank"]),
        ("actor.lora.r no.such actor.lora.a", ["actor.lora.rank", "actor.lora.alpha"]),
        ("--config c.yaml", None),
        ("nothing.at.all", []),
    ],
)
def test_help_shows_the_keys_with_a_word(
    words: str, keys: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_expr_config(["--help", *words.split()], GRPOConfig)
    usage, _, *lines = capsys.readouterr().out.splitlines()
    shown = [line.partition(" (")[0] for line in lines if " (" in line and not line.startswith(" ")]
    assert shown == ([key.name for key in config_keys(GRPOConfig) if key.block is None] if keys is None else keys)
    assert usage.startswith(f"usage: {Path(sys.argv[0]).name} --config FILE") and (
        shown or "no key has 'nothing.at.all' in its name" in lines[0]
    )


@pytest.mark.parametrize(
    ("name", "cls", "block"),
    [
        *(("gsm8k_grpo", GRPOConfig, "actor"), ("gsm8k_ppo", PPOConfig, "actor"), ("gsm8k_sft", SFTConfig, "model")),
        *(("dpo", DPOConfig, "model"), ("reward_model", RWConfig, "model"), ("distill", GRPOConfig, "actor")),
    ],
)
def test_shipped_configs_load(name: str, cls: type, block: str) -> None:
    """Those for CPUs leave the models to the command."""
    given = [f"{key}.path=tiny" for key in (block, *["teacher"] * (name == "distill"))]
    for suffix, words in (("", []), ("_cpu", given)):
        config = load_expr_config(["--config", str(CONFIGS / f"{name}{suffix}.yaml"), *words], cls)[0]
        assert config.trained[0] == block and config.tokenizer_path == config.trained[1].path
        assert (config.cluster.n_gpus_per_node == 0) == bool(suffix)
        others = [
            one for one in (getattr(config, key, None) for key in ("ref", "teacher", "critic")) if one is not None
        ]
        assert all(one.path for one in others)
    with pytest.raises(ConfigError, match=rf"{block}\.path must be given"):
        load_expr_config(["--config", str(CONFIGS / f"{name}_cpu.yaml"), *given[1:]], cls)


def test_rewards_are_named_one_or_several_with_weights(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL).reward == "arealite.reward:gsm8k_reward_fn"
    assert load(tmp_path, MINIMAL, "reward=my.py:score").reward == "my.py:score"
    several = MINIMAL + "\nreward: {my.py:score: 1, my.py:brevity: 0.1}\n"
    assert load(tmp_path, several).reward == {"my.py:score": 1.0, "my.py:brevity": 0.1}
    assert load(tmp_path, several, "reward=my.py:score").reward == "my.py:score"
    assert load(tmp_path, MINIMAL, "reward={my.py:score: 2}").reward == {"my.py:score": 2.0}
    assert "reward must be " in refusal(tmp_path, MINIMAL, "reward=[my.py:score]")
    assert "reward must be a valid number" in refusal(tmp_path, MINIMAL, "reward={my.py:score: much}")
