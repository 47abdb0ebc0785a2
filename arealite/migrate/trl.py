"""TRL's `GRPOConfig` and `SFTConfig` with the model and data arguments of its scripts, as YAML or JSON; TRL 1.16.

TRL counts completions per device and optimizer steps; we count prompts of the whole run, and batches. Its files do not
say on how many devices they ran.
"""

from typing import Any

from arealite.migrate import rules
from arealite.migrate import trl_values as values
from arealite.migrate.rules import ABSENT, NOTHING, Rule, part_of, patterns, unless

GRPO_KEYS = (
    *("num_generations", "max_completion_length", "epsilon", "epsilon_high", "scale_rewards", "num_iterations"),
    *("steps_per_generation", "generation_batch_size", "use_vllm", "vllm_mode", "temperature", "reward_funcs"),
    *("reward_weights", "mask_truncated_completions", "vllm_importance_sampling_correction"),
)
"""Keys that tell GRPO from SFT."""
PREFERENCE_KEYS = ("f_divergence_type", "precompute_ref_log_probs", "center_rewards_coefficient", "desirable_weight")
"""Keys of trainers that have no table: DPO's, the reward model's and KTO's."""

_BF16 = "parameters are float32; bf16 says in which dtype is computed"
_ALL_KEPT = "the saver keeps all; recover.keep_last bounds the checkpoints to resume from"


def _common(block: str, learning_rate: float, batch: Any) -> dict[str, Rule]:
    optimizer = f"{block}.optimizer"
    return {
        "project": Rule("experiment_name", None, rules.name_of_run),
        "run_name": Rule("trial_name", None, rules.name_of_trial),
        "model_name_or_path": Rule(f"{block}.path", None, rules.or_missing),
        "model_revision": unless("main", "the newest revision of the hub is loaded; name a folder for another one"),
        "num_processes": part_of("allocation_mode", ABSENT),
        "overwrite_output_dir": unless(False, "a run never overwrites another one unasked"),
        "dataset_name": Rule("train_dataset.path", None, rules.or_missing),
        "dataset_config": Rule("train_dataset.config_name", None),
        "dataset_configs": Rule("train_dataset.config_name", make=values.only_config),
        "dataset_train_split": Rule("train_dataset.split"),
        "dataset_test_split": part_of("valid_dataset.split", "test"),
        "per_device_train_batch_size": Rule(f"train_dataset.batch_size, {block}.mb_spec.n_mbs", 8, batch),
        "gradient_accumulation_steps": part_of(f"{block}.mb_spec.n_mbs", 1),
        "num_train_epochs": Rule("total_train_epochs", 3.0, values.epochs),
        "max_steps": Rule("total_train_steps", -1, values.total_steps),
        "learning_rate": Rule(f"{optimizer}.lr", learning_rate),
        "weight_decay": Rule(f"{optimizer}.weight_decay", 0.0),
        "adam_beta1": Rule(f"{optimizer}.beta1", 0.9),
        "adam_beta2": Rule(f"{optimizer}.beta2", 0.999),
        "adam_epsilon": Rule(f"{optimizer}.eps", 1e-08),
        "max_grad_norm": Rule(f"{optimizer}.gradient_clipping", 1.0, values.clipping),
        "lr_scheduler_type": Rule(f"{optimizer}.lr_scheduler_type", "linear", values.schedule),
        "lr_scheduler_kwargs": part_of(f"{optimizer}.min_lr_ratio", None),
        "warmup_ratio": Rule(f"{optimizer}.warmup_steps_proportion", make=values.warmup),
        "warmup_steps": Rule(f"{optimizer}.warmup_steps_proportion", 0, values.warmup),
        "optim": Rule(f"{optimizer}.type", make=values.optimizer),
        "bf16": Rule(f"{block}.dtype", None, values.dtype),
        "fp16": part_of(f"{block}.dtype", False),
        **dict.fromkeys(("dtype", "torch_dtype"), unless("float32", _BF16)),
        "gradient_checkpointing": Rule(f"{block}.gradient_checkpointing", True),
        "torch_compile": Rule(f"{block}.torch_compile", False),
        "attn_implementation": Rule(f"{block}.attn_impl", None),
        "use_peft": Rule(f"{block}.lora", False, values.lora),
        "lora_r": part_of(f"{block}.lora.rank", 16),
        "lora_alpha": part_of(f"{block}.lora.alpha", 32),
        "lora_dropout": part_of(f"{block}.lora.dropout", 0.05),
        "lora_target_modules": part_of(f"{block}.lora.target_modules", None),
        "seed": Rule("seed", 42),
        "output_dir": Rule("cluster.fileroot", why="a folder of all runs"),
        "report_to": Rule("stats_logger.<service>.mode", "none", rules.switch_on),
        "logging_steps": Rule("stats_logger.line_freq_steps", make=values.batches),
        "save_strategy": Rule("saver", "steps", values.per_epoch),
        "save_steps": Rule("saver.freq_steps", 500, values.save),
        "save_total_limit": unless(None, _ALL_KEPT),
        "eval_strategy": Rule("evaluator, valid_dataset", "no", values.evaluate),
        "eval_steps": part_of("evaluator.freq_steps", None),
        "resume_from_checkpoint": Rule("recover.mode", make=values.resume),
        **dict.fromkeys(("load_in_4bit", "load_in_8bit"), unless(False, "models are not quantized")),
        "push_to_hub": unless(False, "models are not uploaded"),
        "use_liger_kernel": unless(False, "kernels are PyTorch's"),
        "neftune_noise_alpha": unless(None, "no noise is added to embeddings"),
        "gradient_checkpointing_kwargs": unless(None, "the layers are always recomputed without reentering"),
        "use_dora": unless(False, "adapters are LoRA's"),
        "use_rslora": unless(False, "adapters are scaled by alpha / rank"),
        "lora_modules_to_save": unless(None, "all but the adapters is frozen"),
        "dataset_streaming": unless(False, "data sets are downloaded whole, and rows read from the disk"),
        "trust_remote_code": unless(False, "code of models is not run"),
    }


GRPO: dict[str, Rule] = {
    **_common("actor", 1e-6, values.batch),
    "generation_batch_size": part_of("train_dataset.batch_size, actor.ppo_n_minibatches", None),
    "steps_per_generation": part_of("actor.ppo_n_minibatches", None),
    "num_iterations": unless(1, "each sample is trained on once; actor.ppo_n_minibatches gives more optimizer steps"),
    "num_generations": Rule("gconfig.n_samples", 8),
    "max_completion_length": Rule("gconfig.max_new_tokens, lite.context", 512, values.length),
    "max_prompt_length": Rule("train_dataset.max_length", why="longer rows are left out, not cut"),
    "prompt (column)": Rule("train_dataset.prompt_key", "prompt"),
    "reward_funcs": Rule("reward", None, values.rewards),
    "reward_weights": part_of("reward", None),
    "temperature": Rule("gconfig.temperature", 1.0),
    "top_p": Rule("gconfig.top_p", 1.0),
    "top_k": Rule("gconfig.top_k", 0, rules.if_positive),
    "min_p": Rule("gconfig.min_p", None, rules.if_true),
    "repetition_penalty": unless(1.0, "the trainer could not reproduce the logprobs of such sampling"),
    "beta": Rule("actor.kl_ctl, actor.kl_in, actor.kl_estimator, ref", 0.0, values.kl),
    "use_bias_correction_kl": unless(True, "the KL term is always weighed by the ratio"),
    "epsilon": Rule("actor.eps_clip", 0.2, values.if_clips),
    "epsilon_high": Rule("actor.eps_clip_higher, actor.cispo_max", None, values.upper),
    "delta": Rule("actor.c_clip", None, values.if_clips),
    "loss_type": Rule("actor.aggregation, actor.objective", "dapo", values.loss),
    "importance_sampling_level": Rule("actor.importance_sampling_level", "token", values.level),
    "sapo_temperature_pos": Rule("actor.sapo_tau_positive", 1.0, values.if_sapo),
    "sapo_temperature_neg": Rule("actor.sapo_tau_negative", 1.05, values.if_sapo),
    "scale_rewards": Rule("actor.reward_scale", "group", values.scale),
    "mask_truncated_completions": Rule("actor.truncated", False, lambda value, _: "mask" if value else NOTHING),
    "entropy_coef": Rule("actor.entropy_ctl", 0.0),
    "off_policy_mask_threshold": Rule("actor.sequence_mask_delta", None),
    "cast_lm_head_to_fp32": Rule("actor.cast_lm_head_to_fp32", False),
    "disable_dropout": part_of("actor.disable_dropout", False),
    "shuffle_dataset": Rule("train_dataset.shuffle", True),
    "use_vllm": Rule("allocation_mode, cluster", False, values.allocation),
    "use_cpu": part_of("cluster.n_gpus_per_node", False),
    "vllm_mode": part_of("allocation_mode", "colocate"),
    "vllm_tensor_parallel_size": part_of("allocation_mode", 1),
    "vllm_gpu_memory_utilization": unless(0.3, "servers have their GPUs to themselves; vllm.gpu_memory_utilization"),
    "vllm_max_model_length": Rule("vllm.max_model_len", None, rules.if_true),
    "vllm_server_base_url": unless(None, "the launcher starts servers; `trl vllm-serve` speaks another protocol"),
    "vllm_importance_sampling_correction": Rule("actor.proximal, actor.correction", True, values.correction),
    "vllm_importance_sampling_mode": part_of("actor.correction", "sequence_mask"),
    "vllm_importance_sampling_clip_max": part_of("actor.correction.upper", 3.0),
    "vllm_importance_sampling_clip_min": part_of("actor.correction.lower", None),
    "top_entropy_quantile": unless(1.0, "all trained tokens count, whatever their entropy"),
    "use_adaptive_entropy": unless(False, "the entropy bonus has a constant weight"),
    "sync_ref_model": unless(False, "the reference stays the model before training"),
    "multi_objective_aggregation": unless("sum_then_normalize", "rewards are summed before they are scaled"),
    "max_tool_calling_iterations": unless(None, "a workflow bounds its turns: docs/workflows.md"),
    "log_completions": unless(False, "every trained sample is stored in the run folder's rollouts/"),
}
"""Keys of GRPOConfig. The column is none: TRL's data sets have it."""
SFT: dict[str, Rule] = {
    **_common("model", 2e-5, values.batch_of_sft),
    "max_length": Rule("train_dataset.max_length", 1024, why="longer rows are left out, not cut"),
    "packing": unless(False, "micro-batches are always packed, and rows never see each other"),
    "padding_free": unless(False, "micro-batches are always packed"),
    "completion_only_loss": Rule("", make=values.of_answers),
    "assistant_only_loss": Rule("", make=values.of_answers),
    "dataset_text_field": unless("text", "rows are conversations, or a prompt and an answer"),
    "activation_offloading": Rule("model.activation_offloading", False),
    "loss_type": Rule("", "nll", values.loss_of_sft),
    "shuffle_dataset": unless(False, "train_dataset.shuffle orders every epoch anew, as TRL's sampler does"),
    "use_cpu": Rule("allocation_mode, cluster", False, values.allocation_of_sft),
}
"""Keys of SFTConfig."""
IGNORED = patterns(
    {
        "the loop reads rows itself, when a batch needs them": "dataloader_* dataset_num_proc",
        "metrics.jsonl has every step": "logging_* log_*",
        "models are not uploaded": "hub_*",
        "the trainer is PyTorch's FSDP2": "ddp_* deepspeed",
        "the trainer is PyTorch's FSDP2: actor.fsdp": "fsdp*",
        "vespo is not implemented": "vespo_*",
        "the entropy bonus has a constant weight": "entropy_coef_*",
        "the reference stays the model before training": "ref_model_*",
        "options of vLLM servers stand in the block vllm": "vllm_*",
        "the script decides": "do_*",
        "an evaluation takes every row once": "per_device_eval_batch_size",
        "models are not quantized": "bnb_*",
        "kernels are PyTorch's": "use_liger",
    }
)
"""Patterns of keys that change no number of the run, by why they are gone."""
