"""Configs with keys and values that others publish among their examples: nothing of them is lost silently.

The files are ours; keys and values are those of verl's `run_*.sh` for GRPO (also with LoRA), PPO, CISPO and DAPO, of
prime-rl's examples for rl and sft, of 2025 and of October 2026, of AReaL's `gsm8k_grpo.yaml` of v0.3 and of 2026, and
of recipes for TRL's GRPO and SFT (open-r1).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from arealite.api.cli_args import GRPOConfig, PPOConfig, SFTConfig, load_expr_config
from arealite.cli.main import main
from arealite.migrate import prime_rl, trl, verl
from arealite.migrate.migrate import _read, _resolved
from arealite.migrate.rules import Old

VERL_SCRIPT = """\
#!/usr/bin/env bash
set -xeuo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
NNODES=${NNODES:-1}
NDEVICES_PER_NODE=${NDEVICES_PER_NODE:-}
BATCH=${TRAIN_BATCH_SIZE:-1024}
MINI=${PPO_MINI_BATCH_SIZE:-256}
TOKENS=${PPO_MAX_TOKEN_LEN_PER_GPU:-24576}
TRAIN_FILE=${TRAIN_FILE:-$HOME/data/gsm8k/train.parquet}
case "${DEVICE}" in
    gpu) n_devices=${NDEVICES_PER_NODE:-${NGPUS_PER_NODE:-8}} ;;
    *) echo "which device?" >&2; exit 1 ;;
esac
DATA=(
    algorithm.adv_estimator=ESTIMATOR
    data.train_files="['$TRAIN_FILE', '$HOME/data/math/train.parquet']"
    data.val_files=$HOME/data/gsm8k/test.parquet
    data.train_batch_size=${BATCH}
    data.max_prompt_length=1024
    data.max_response_length=2048
    data.filter_overlong_prompts=True
    data.truncation='error'
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=${MINI}
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${TOKENS}
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.fsdp_config.param_offload=False
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=${TOKENS}
    actor_rollout_ref.ref.fsdp_config.param_offload=True
    OTHERS
)
EXTRA=(
)
TRAINER=(
    trainer.balance_batch=True
    trainer.critic_warmup=0
    trainer.logger='["console","wandb"]'
    trainer.project_name=sums
    trainer.experiment_name=qwen3_$(date +%Y%m%d_%H%M)
    trainer.n_gpus_per_node=${n_devices}
    trainer.nnodes=${NNODES}
    trainer.save_freq=20
    trainer.test_freq=5
    trainer.total_epochs=15
)
LAUNCH=(python3)
if [ "${VERL_USE_UV:-1}" != 0 ]; then uv sync --extra vllm --frozen; LAUNCH=(uv run --frozen python3); fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo "${DATA[@]}" "${ACTOR[@]}" "${EXTRA[@]}" "${TRAINER[@]}" "$@"
"""


def verl_script(estimator: str, *others: str) -> str:
    return VERL_SCRIPT.replace("ESTIMATOR", estimator).replace("OTHERS", "\n    ".join(others))


KL = tuple(
    f"actor_rollout_ref.actor.{one}" for one in ("use_kl_loss=True", "kl_loss_coef=0.001", "kl_loss_type=low_var_kl")
)
GRPO = verl_script("grpo", "actor_rollout_ref.rollout.n=5", "algorithm.use_kl_in_reward=False", *KL)
CISPO = verl_script(
    *("grpo", "actor_rollout_ref.rollout.n=5", "actor_rollout_ref.actor.policy_loss.loss_mode=cispo"),
    *("actor_rollout_ref.actor.clip_ratio_low=10", "actor_rollout_ref.actor.clip_ratio_high=0.2", *KL),
)
LORA = verl_script(
    *("grpo", "actor_rollout_ref.rollout.n=5", "actor_rollout_ref.model.lora_rank=64", *KL),
    *("actor_rollout_ref.model.lora_alpha=32", "actor_rollout_ref.model.target_modules=all-linear"),
    *("actor_rollout_ref.rollout.load_format=safetensors", "actor_rollout_ref.rollout.layered_summon=True"),
    *("actor_rollout_ref.model.use_shm=True", "data.prompt_key=messages", "data.shuffle=False"),
)
PPO = verl_script(
    *("gae", "critic.model.path=Qwen/Qwen3-8B", "critic.optim.lr=1e-5", "critic.use_dynamic_bsz=True"),
    *("critic.model.use_remove_padding=True", "critic.ppo_max_token_len_per_gpu=${TOKENS}"),
    *("critic.model.enable_gradient_checkpointing=True", "critic.fsdp.param_offload=False"),
)
DAPO = """\
#!/usr/bin/env bash
adv_estimator=grpo
enable_overlong_buffer=True
overlong_buffer_len=$((1024 * 4))
train_prompt_bsz=512
gen_prompt_bsz=$((train_prompt_bsz * 3))
NNODES=${NNODES:-16}
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"${RAY_DATA_HOME}/models/Qwen2.5-32B"}
top_k=-1 # 0 for another server
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
offload=True
ray job submit --no-wait --runtime-env="${RUNTIME_ENV}" -- python3 -m recipe.dapo.main_dapo \\
    data.train_files="${RAY_DATA_HOME}/data/dapo-math-17k.parquet" \\
    data.truncation='left' \\
    data.max_prompt_length=${max_prompt_length} \\
    data.max_response_length=${max_response_length} \\
    data.gen_batch_size=${gen_prompt_bsz} \\
    data.train_batch_size=${train_prompt_bsz} \\
    actor_rollout_ref.rollout.n=16 \\
    algorithm.adv_estimator=${adv_estimator} \\
    algorithm.use_kl_in_reward=False \\
    algorithm.kl_ctrl.kl_coef=0.0 \\
    actor_rollout_ref.actor.use_kl_loss=False \\
    actor_rollout_ref.actor.kl_loss_coef=0.0 \\
    actor_rollout_ref.actor.clip_ratio_low=0.2 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.clip_ratio_c=10.0 \\
    algorithm.filter_groups.enable=True \\
    algorithm.filter_groups.max_num_gen_batches=10 \\
    algorithm.filter_groups.metric=acc \\
    actor_rollout_ref.model.path="${MODEL_PATH}" \\
    +actor_rollout_ref.model.override_config.attention_dropout=0. \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt_length + max_response_length)) \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.actor.optim.weight_decay=0.1 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} \\
    actor_rollout_ref.actor.loss_agg_mode="token-mean" \\
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 \\
    algorithm.rollout_correction.rollout_is=sequence \\
    algorithm.rollout_correction.rollout_is_threshold=2.0 \\
    algorithm.rollout_correction.rollout_is_batch_normalize=true \\
    algorithm.rollout_correction.rollout_rs=seq_mean_k1 \\
    actor_rollout_ref.rollout.top_k="${top_k}" \\
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \\
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \\
    actor_rollout_ref.rollout.max_num_batched_tokens=$((max_prompt_length + max_response_length)) \\
    reward_model.reward_manager=dapo \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=${enable_overlong_buffer} \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=${overlong_buffer_len} \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 \\
    trainer.logger=['console','wandb'] \\
    trainer.nnodes="${NNODES}" \\
    trainer.val_before_train=False \\
    trainer.total_epochs=1 \\
    trainer.resume_mode=auto
"""
TREE = """\
actor_rollout_ref:
  actor:
    optim: {_target_: verl.Optim, optimizer: AdamW, lr: 1.0e-06, clip_grad: 1.0, betas: [0.9, 0.999]}
    fsdp_config: {wrap_policy: {min_num_params: 0}, param_offload: false, fsdp_size: -1, dtype: bfloat16}
    strategy: fsdp
    ppo_mini_batch_size: 256
    tis_imp_ratio_cap: 2
    policy_loss: {loss_mode: vanilla, clip_cov_ratio: 0.0002}
    checkpoint: {save_contents: [model, optimizer], load_contents: "${.save_contents}"}
    profiler: {tool: "${oc.select:global_profiler.tool,null}", enable: false}
    router_replay: {mode: disabled}
  ref: {strategy: "${actor_rollout_ref.actor.strategy}", model: null}
  rollout:
    name: ???
    n: 4
    mode: async
    prompt_length: "${oc.select:data.max_prompt_length,512}"
    engine_kwargs: {vllm: {}, sglang: {}}
    multi_turn: {enable: false, max_assistant_turns: null}
    agent: {num_workers: 8}
    prometheus: {enable: false, port: 9090}
  model: {path: ~/models/deepseek-llm-7b-chat, mtp: {enable: false}, tiled_mlp: {enabled: false}, lora_rank: 0}
  hybrid_engine: true
  nccl_timeout: 600
data: {train_files: ~/data/train.parquet, val_files: ~/data/test.parquet, train_batch_size: 1024, tokenizer: null}
reward_manager: {source: register, name: naive, module: {path: null}}
critic: {optim: {lr: 1.0e-05}, model: {path: ~/models/deepseek-llm-7b-chat}, cliprange_value: 0.5, enable: null}
reward_model: {enable: false, model: {path: ~/models/rm}, sandbox_fusion: {url: null}}
custom_reward_function: {path: null, name: compute_score}
algorithm: {adv_estimator: grpo, gamma: 1.0, lam: 1.0, kl_ctrl: {type: fixed, kl_coef: 0.001}, pf_ppo: {pow: 2.0}}
trainer: {total_epochs: 30, project_name: verl_examples, experiment_name: gsm8k, device: cuda, esi_redundant_time: 0}
global_profiler: {tool: null, global_tool_config: {nsys: {discrete: false}}}
transfer_queue: {enable: false}
ray_kwargs: {ray_init: {num_cpus: null}}
"""
PRIME = """\
max_steps = 200
seq_len = 4096
[log]
level = "debug"
[deployment]
num_train_gpus = 2
num_infer_gpus = 6
[model]
name = "Qwen/Qwen3-4B-Instruct-2507"
[monitors.wandb]
project = "wiki-search"
name = "first"
[trainer.optim]
lr = 1e-5
weight_decay = 0.0
[trainer.model.lora]
rank = 8
dropout = 0.0
target_modules = ["q_proj", "k_proj"]
[orchestrator]
batch_size = 512
max_off_policy_steps = 16
[orchestrator.train]
group_size = 16
[orchestrator.concurrency]
initial_inflight = 1024
max_inflight = 2048
[orchestrator.train.sampling]
max_completion_tokens = 512
[[orchestrator.train.source]]
name = "wiki"
ratio = 0.3
curriculum = { gates = { zero_advantage = { type = "advantage_range" } } }
env.taskset.id = "wiki-search"
env.agent.harness.id = "null"
[orchestrator.eval]
interval = 25
[[orchestrator.eval.source]]
name = "aime2025"
env.taskset.id = "aime25"
[ckpt]
[inference.vllm]
tensor_parallel_size = 2
tool_call_parser = "hermes"
[orchestrator.renderer]
name = "default"
"""
PRIME_OLDER = """\
max_steps = 5000
[wandb]
project = "hendrycks-sanity"
name = "first"
[deployment]
num_train_gpus = 4
num_infer_gpus = 4
[model]
name = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
[orchestrator]
batch_size = 512
group_size = 8
seq_len = 8192
max_inflight_rollouts = 1024
[[orchestrator.train.env]]
name = "hendrycks-math"
taskset = { id = "math-env", dataset_subset = "default" }
harness = { id = "null", runtime = { type = "subprocess" } }
[orchestrator.eval]
interval = 50
[[orchestrator.eval.env]]
name = "aime2024"
taskset = { id = "aime24" }
group_size = 32
[trainer.model]
seq_len = 16384
[inference.model]
max_model_len = 8192
[inference.parallel]
tp = 4
"""
PRIME_NODES = """\
max_steps = 400
seq_len = 32768
[slurm]
job_name = "math"
[deployment]
type = "multi_node"
num_train_nodes = 2
num_infer_nodes = 3
[weight_broadcast]
type = "nccl"
[ckpt]
interval = 50
keep_last = 1
[model]
name = "Qwen/Qwen3-8B"
[trainer.model]
impl = "custom"
attn = "flash_attention_3"
cp = 2
[trainer.model.compile]
[trainer.model.ac_offloading]
max_inflight_activations = 5
[trainer.model.ac]
freq = 1
[orchestrator]
batch_size = 512
oversampling_factor = 2
[orchestrator.train]
group_size = 8
[orchestrator.train.algo]
type = "max_rl"
[inference.vllm]
tensor_parallel_size = 4
data_parallel_size = 2
gpu_memory_utilization = 0.85
"""
PRIME_SFT = """\
max_steps = 100
[deployment]
type = "multi_node"
num_nodes = 4
[env_vars]
TRITON_CACHE_DIR = "/tmp/triton"
[ckpt]
[monitors.wandb]
project = "dataset-sft"
[model]
name = "Qwen/Qwen3-8B"
fused_lm_head_token_chunk_size = 1024
[data]
seq_len = 4096
batch_size = 32
micro_batch_size = 1
[[data.source]]
dataset = "org/first"
split = "math"
[[data.source]]
dataset = "org/second"
[optim]
type = "adamw"
lr = 2e-5
[scheduler]
type = "constant"
[eval]
interval = 25
[eval.select]
limit = 32
[[eval.source]]
name = "reverse-text"
[inference]
"""
AREAL_BLOCK = "{experiment_name: '${experiment_name}', trial_name: '${trial_name}', fileroot: '${cluster.fileroot}'"
AREAL = """\
experiment_name: sums
trial_name: trial0
ALLOCATION
cluster: {n_nodes: 1, n_gpus_per_node: 8, fileroot: /tmp/runs, name_resolve: {type: nfs, nfs_record_root: /tmp/names}}
seed: 1
total_train_epochs: 10
tokenizer_path: ${actor.path}
rollout:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  max_concurrent_rollouts: 256
  queue_size: null
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 2
  enable_rollout_tracing: false
  OF_ROLLOUT
gconfig: {n_samples: 4, min_new_tokens: 0, max_new_tokens: 1024, greedy: false, temperature: 1.0}
actor:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  path: Qwen/Qwen2-1.5B-Instruct
  init_from_scratch: false
  disable_dropout: true
  gradient_checkpointing: false
  dtype: bfloat16
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer:
    type: adam
    lr: 1.70e-5
    weight_decay: 0.017
    beta1: 0.9
    beta2: 0.999
    eps: 1e-8
    lr_scheduler_type: constant
    gradient_clipping: 1.0
    warmup_steps_proportion: 0.001
  eps_clip: 0.4
  reward_scaling: 10.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  recompute_logprob: true
  use_decoupled_loss: true
  behav_imp_weight_cap: 5.0
  OF_ACTOR
ref: {path: "${actor.path}", init_from_scratch: false, dtype: "${actor.dtype}", optimizer: null, OF_REF}
sglang:
  model_path: ${actor.path}
  random_seed: ${seed}
  skip_tokenizer_init: true
  dtype: ${actor.dtype}
  max_running_requests: null
  context_length: 32768
  mem_fraction_static: 0.8
train_dataset: {path: openai/gsm8k, type: rl, batch_size: 256, shuffle: true, pin_memory: true, num_workers: 4}
valid_dataset: {path: openai/gsm8k, type: rl, batch_size: 256, pin_memory: true, num_workers: 4}
saver: BLOCK, freq_epochs: 1, freq_steps: null, freq_secs: null}
evaluator: BLOCK, freq_epochs: 1, freq_steps: null, freq_secs: null}
stats_logger: BLOCK, wandb: {mode: disabled}}
"""
AREAL_V03 = (
    AREAL.replace("ALLOCATION", "allocation_mode: sglang.d4p1t1+d4p1t1\nasync_training: true\nserver_only: false")
    .replace("OF_ROLLOUT", "schedule_policy: round_robin")
    .replace("OF_ACTOR", "group_size: ${gconfig.n_samples}\n  group_adv_norm: false\n  backend: fsdp")
    .replace("OF_REF", "backend: fsdp")
    .replace("BLOCK", AREAL_BLOCK)
    + "checkpointer: {freq_epochs: 1, freq_secs: 3600}\n"
)
AREAL_2026 = (
    AREAL.replace("ALLOCATION", "allocation_mode: sglang:d4p1t1+d4p1t1\nenable_offload: false\nscheduler: {type: null}")
    .replace("OF_ROLLOUT", "scheduling_spec: ${actor.scheduling_spec}\n  dump_to_file: true")
    .replace(
        "OF_ACTOR",
        "reward_norm: {mean_level: group, std_level: group, group_size: '${gconfig.n_samples}'}\n"
        "  adv_norm: {mean_level: batch, std_level: batch}\n"
        "  weight_update_mode: xccl\n"
        "  scheduling_spec: [{task_type: worker, gpu: 1, cmd: python3 -m areal.scheduler.rpc.rpc_server}]",
    )
    .replace("OF_REF", "scheduling_strategy: {type: colocation, target: actor}")
    .replace("BLOCK", AREAL_BLOCK)
    + f"recover: {AREAL_BLOCK}, mode: disabled, freq_epochs: 1, freq_secs: 3600}}\n"
    + f"perf_tracer: {AREAL_BLOCK}, enabled: false}}\n"
)
TRL = """\
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
bf16: true
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
hub_model_id: org/model
hub_strategy: every_save
log_level: info
logging_steps: 1
logging_strategy: steps
max_steps: -1
num_train_epochs: 1
output_dir: data/run
overwrite_output_dir: true
push_to_hub: true
report_to: [wandb]
save_total_limit: 1
seed: 42
"""
TRL_GRPO = f"""\
{TRL}
dataset_name: AI-MO/NuminaMath-TIR
dataset_configs: [all]
num_processes: 7
use_vllm: true
vllm_device: auto
vllm_gpu_memory_utilization: 0.7
do_eval: true
eval_strategy: steps
eval_steps: 100
gradient_accumulation_steps: 16
learning_rate: 2.0e-05
log_completions: true
logging_first_step: true
lr_scheduler_type: cosine
max_prompt_length: 512
max_completion_length: 1024
num_generations: 7
per_device_eval_batch_size: 32
per_device_train_batch_size: 16
save_strategy: epoch
warmup_ratio: 0.1
"""
TRL_SFT = f"""\
{TRL}
dataset_name: open-r1/codeforces-cots
dataset_config: solutions_decontaminated
dataset_num_proc: 48
do_eval: false
eval_strategy: "no"
gradient_accumulation_steps: 8
learning_rate: 1.0e-05
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {{min_lr_rate: 0.1}}
packing: false
max_grad_norm: 0.2
max_length: 32768
per_device_eval_batch_size: 1
per_device_train_batch_size: 2
save_strategy: steps
save_steps: 0.2
use_liger: true
warmup_ratio: 0.03
"""
OF_AREAL = {"areal, v0.3": (".yaml", AREAL_V03), "areal, 2026": (".yaml", AREAL_2026)}
"""These are converted by the loader's own table of old keys."""
FILES: dict[str, tuple[str, str]] = {
    "verl, GRPO": (".sh", GRPO),
    "verl, CISPO": (".sh", CISPO),
    "verl, LoRA": (".sh", LORA),
    "verl, PPO": (".sh", PPO),
    "verl, DAPO": (".sh", DAPO),
    "verl, the tree": (".yaml", TREE),
    "prime-rl": (".toml", PRIME),
    "prime-rl, older": (".toml", PRIME_OLDER),
    "prime-rl, nodes": (".toml", PRIME_NODES),
    "prime-rl, sft": (".toml", PRIME_SFT),
    "trl, GRPO": (".yaml", TRL_GRPO),
    "trl, SFT": (".yaml", TRL_SFT),
}


def migrated(folder: Path, name: str, cls: type[Any], *filled: str) -> tuple[Any, str]:
    """Rewrite a file; return the config that its result loads as, with what is left to fill in, and its text."""
    suffix, text = (FILES | OF_AREAL)[name]
    old, new = folder / f"old{suffix}", folder / "new.yaml"
    old.write_text(text)
    assert main(["migrate", str(old), "--out", str(new)]) == (1 if filled else 0)
    written = new.read_text()
    assert "# To decide:" not in written, written
    missing = [key.partition("=")[0] for key in filled]
    assert sorted(missing) == sorted(_missing(yaml.safe_load(written))), "what is left to fill in"
    return load_expr_config(["--config", str(new), *filled], cls)[0], written


def _missing(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in tree.items():
        found += (
            _missing(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"] * (value == "???")
        )
    return found


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_converted_or_named(name: str, tmp_path: Path) -> None:
    suffix, text = FILES[name]
    old, new = tmp_path / f"old{suffix}", tmp_path / "new.yaml"
    old.write_text(text)
    main(["migrate", str(old), "--out", str(new)])
    tables: dict[str, tuple[Any, Any, Any]] = {
        "verl": (verl.RULES, verl.IGNORED, verl.ALIASES),
        "prime-rl": (prime_rl.RL, prime_rl.IGNORED, prime_rl.ALIASES),
        "prime-rl, sft": (prime_rl.SFT, prime_rl.IGNORED, prime_rl.ALIASES),
        "trl, GRPO": (trl.GRPO, trl.IGNORED, None),
        "trl, SFT": (trl.SFT, trl.IGNORED, None),
    }
    rules, ignored, aliases = tables.get(name) or tables[name.partition(",")[0]]
    keys = Old(_resolved(_read(old)[0]), rules, framework="", devices=1, stem="", aliases=aliases)
    assert len(keys.given) > 12
    for key, value in keys.given.items():
        if key not in rules:
            assert any(fnmatchcase(key, one) for one in ignored), key
            is_off = value in (None, False, "", [])
            assert is_off or keys.written[key] in " ".join(new.read_text().replace("#", "").split()), (
                f"{key} is not named"
            )


def test_grpo_of_verl(tmp_path: Path) -> None:
    config, _ = migrated(tmp_path, "verl, GRPO", GRPOConfig, "reward=a:b")
    data = config.train_dataset
    assert data.path == f"{Path.home()}/data/gsm8k/train.parquet" and data.mixed_with[0].path.endswith(
        "/math/train.parquet"
    )
    assert (data.batch_size, data.max_length, config.gconfig.max_new_tokens, config.gconfig.n_samples) == (
        *(1024, 1024),
        *(2048, 5),
    )
    assert (config.actor.ppo_n_minibatches, config.actor.mb_spec.max_tokens_per_mb) == (4, 24576)
    assert (config.actor.kl_ctl, config.actor.kl_in, config.actor.kl_estimator) == (0.001, "loss", "k3")
    assert (config.allocation_mode, config.cluster.n_gpus_per_node) == ("vllm.d2p1t2+d4p1t1", 8)
    assert (config.saver.freq_steps, config.evaluator.freq_steps, config.total_train_epochs) == (20, 5, 15)


def test_cispo_of_verl(tmp_path: Path) -> None:
    config, _ = migrated(tmp_path, "verl, CISPO", GRPOConfig, "reward=a:b")
    assert (config.actor.objective, config.actor.cispo_max) == ("cispo", 1.2)


def test_lora_of_verl(tmp_path: Path) -> None:
    config, _ = migrated(tmp_path, "verl, LoRA", GRPOConfig, "reward=a:b")
    assert (config.actor.lora.rank, config.actor.lora.alpha, config.actor.lora.target_modules) == (64, 32, "all-linear")
    assert (config.train_dataset.prompt_key, config.train_dataset.shuffle) == ("messages", False)


def test_a_critic_of_verl(tmp_path: Path) -> None:
    config, _ = migrated(tmp_path, "verl, PPO", PPOConfig, "reward=a:b")
    assert (config.critic.path, config.critic.optimizer.lr, config.actor.gae_lambda) == ("Qwen/Qwen3-8B", 1e-5, 1.0)


def test_dapo_of_verl(tmp_path: Path) -> None:
    """Its lengths are computed, and the penalty of long completions has no key of the actor there."""
    filled = ("reward=a:b", "actor.optimizer.warmup_steps_proportion=0.1")
    config, text = migrated(tmp_path, "verl, DAPO", GRPOConfig, *filled)
    actor = config.actor
    assert (config.train_dataset.max_length, config.gconfig.max_new_tokens) == (2048, 20480)
    assert actor.mb_spec.max_tokens_per_mb == 2048 + 20480
    assert (actor.overlong_buffer, actor.overlong_penalty, actor.dynamic_sampling) == (4096, 0.5, True)
    assert (actor.eps_clip, actor.eps_clip_higher, actor.c_clip) == (0.2, 0.28, 10.0)
    assert (actor.correction.action, actor.correction.level, actor.correction.upper) == ("truncate", "sequence", 2.0)
    assert "reward_model.reward_kwargs.overlong_buffer_cfg.len" in text, "as the file calls it"
    assert "# trainer.val_before_train: false -- " in text and "rollout_rs: seq_mean_k1 -- " in text


def test_the_tree_that_verl_prints(tmp_path: Path) -> None:
    config, _ = migrated(tmp_path, "verl, the tree", GRPOConfig, "reward=a:b")
    correction = config.actor.correction
    assert (correction.action, correction.level, correction.upper) == ("truncate", "token", 2.0)
    assert (config.gconfig.n_samples, config.allocation_mode) == (4, "sglang.d2p1t2+d4p1t1")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("prime-rl", (32, 16, 512, 16, 128, "vllm.d3p1t2+d2p1t1", 1, 4096, "none")),
        ("prime-rl, older", (64, 8, 8192, 8, 128, "vllm.d1p1t4+d4p1t1", 1, 8192, "none")),
        ("prime-rl, nodes", (64, 8, 32768, 8, None, "vllm.d6p1t4+d16p1t1", 5, 32768, "group_mean")),
    ],
)
def test_rl_of_prime_rl(name: str, expected: tuple[Any, ...], tmp_path: Path) -> None:
    config, text = migrated(tmp_path, name, GRPOConfig, "reward=a:b", "train_dataset.path=gsm8k")
    rollout = config.rollout
    assert expected == (
        *(config.train_dataset.batch_size, config.gconfig.n_samples, config.gconfig.max_new_tokens),
        *(rollout.max_head_offpolicyness, rollout.max_concurrent_rollouts if expected[4] else None),
        *(config.allocation_mode, config.cluster.n_nodes, config.vllm["max_model_len"], config.actor.reward_scale),
    )
    assert name == "prime-rl, nodes" or (config.stats_logger.wandb["mode"], config.trial_name) == ("online", "first")
    told = {"prime-rl": "of wiki-search; environments", "prime-rl, older": "of math-env; environments"}
    assert told.get(name, "") in " ".join(text.replace("#", "").split())


def test_sft_of_prime_rl(tmp_path: Path) -> None:
    config, text = migrated(tmp_path, "prime-rl, sft", SFTConfig)
    data = config.train_dataset
    assert (data.path, data.split, data.mixed_with[0].path) == ("org/first", "math", "org/second")
    assert (config.allocation_mode, config.cluster.n_nodes, config.cluster.n_gpus_per_node) == ("d32", 4, 8)
    assert (config.experiment_name, config.model.optimizer.lr) == ("dataset-sft", 2e-5)
    assert "# env_vars.* (env_vars.TRITON_CACHE_DIR) -- launcher.trainer_env_vars" in text


@pytest.mark.parametrize("name", OF_AREAL)
def test_grpo_of_areal(name: str, tmp_path: Path) -> None:
    config, text = migrated(tmp_path, name, GRPOConfig)
    correction = config.actor.correction
    assert (config.allocation_mode, config.train_dataset.path) == ("sglang.d4p1t1+d4p1t1", "openai/gsm8k")
    assert (config.actor.proximal, correction.upper, config.actor.adv_norm) == ("recompute", 5.0, True)
    assert config.actor.baseline == ("none" if name == "areal, v0.3" else "group_mean")
    told = " ".join(text.replace("#", "").split())
    for key in ("pin_memory", "num_workers", "enable_rollout_tracing", "name_resolve"):
        assert f"{key}: " in told, key


def test_grpo_of_trl(tmp_path: Path) -> None:
    config, _ = migrated(tmp_path, "trl, GRPO", GRPOConfig, "reward=a:b")
    data = config.train_dataset
    assert (data.path, data.config_name, data.batch_size) == ("AI-MO/NuminaMath-TIR", "all", 16 * 7 * 16 // 7)
    assert (config.gconfig.n_samples, config.gconfig.max_new_tokens, data.max_length) == (7, 1024, 512)
    assert (config.evaluator.freq_steps, config.saver.freq_epochs, config.valid_dataset.split) == (100, 1, "test")


def test_fine_tuning_of_trl(tmp_path: Path) -> None:
    config, text = migrated(tmp_path, "trl, SFT", SFTConfig)
    optimizer = config.model.optimizer
    assert (optimizer.lr_scheduler_type, optimizer.min_lr_ratio, optimizer.gradient_clipping) == ("cosine", 0.1, 0.2)
    assert (config.train_dataset.batch_size, config.train_dataset.max_length) == (2 * 8, 32768)
    assert "# save_steps: 0.2 -- " in text and "# use_liger -- kernels are PyTorch's" in text


def test_several_configurations_of_trl_are_left_to_decide(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(TRL_GRPO.replace("[all]", "[easy, hard]"))
    assert main(["migrate", str(tmp_path / "old.yaml"), "--out", str(tmp_path / "new.yaml")]) == 1
    told = " ".join((tmp_path / "new.yaml").read_text().replace("#", "").split())
    assert 'dataset_configs must have a counterpart here: got ["easy", "hard"], but one configuration is read' in told


@pytest.mark.parametrize("algorithm", ['type = "opd"', 'type = "grpo"\nloss_aggregation = "prompt"', 'id = "mine"'])
def test_another_algorithm_of_prime_rl_is_left_to_decide(algorithm: str, tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text(PRIME_NODES.replace('type = "max_rl"', algorithm))
    assert main(["migrate", str(tmp_path / "old.toml"), "--out", str(tmp_path / "new.yaml")]) == 1
    told = " ".join((tmp_path / "new.yaml").read_text().replace("#", "").split())
    assert "orchestrator.train.algo must have a counterpart here: got" in told


def test_a_key_of_two_branches_is_left_to_decide(tmp_path: Path) -> None:
    script = f"{GRPO}\nTRAINER+=(trainer.n_gpus_per_node=16)\n"
    (tmp_path / "old.sh").write_text(script)
    assert main(["migrate", str(tmp_path / "old.sh"), "--out", str(tmp_path / "new.yaml")]) == 1
    text = (tmp_path / "new.yaml").read_text()
    assert yaml.safe_load(text)["cluster"]["n_gpus_per_node"] == 8
    assert "# trainer.n_gpus_per_node must have one value: got 8 and 16. The first one is taken;" in text


@pytest.mark.parametrize(
    ("written", "computed"),
    [
        ("$((2 * (3 + 4)))", "14"),
        ("$((${A:-6} / 4))", "1"),
        ("$(( 7 % N ))", "1"),
        ("$((N ** 9999999))", "$((N**9999999))"),
        ("$((unknown + 1))", "$((unknown+1))"),
        ("$((1 / 0))", "$((1/0))"),
    ],
)
def test_arithmetic_of_a_script(written: str, computed: str, tmp_path: Path) -> None:
    (tmp_path / "old.sh").write_text(f"N=3\npython -m verl data.train_batch_size={written} data.seed=1\n")
    tree, several = _read(tmp_path / "old.sh")
    assert (str(tree["data"]["train_batch_size"]), several) == (computed, [])
