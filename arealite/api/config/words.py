"""What TRL, verl, prime-rl and AReaL call our keys, by the last part of theirs, and what of theirs we have not yet.

docs/migration.md shows the same tables.
"""

import difflib
from collections.abc import Mapping

from arealite.api.config.schema import ConfigKey

THEIR_WORDS = {
    "path": "model_name_or_path model_name model_path",
    "optimizer.lr": "learning_rate max_lr",
    "optimizer.warmup_steps_proportion": "warmup_ratio warmup_steps lr_warmup_steps lr_warmup_steps_ratio",
    "optimizer.gradient_clipping": "max_grad_norm max_norm grad_clip clip_grad",
    "optimizer.lr_scheduler_type": "lr_scheduler lr_decay_style",
    "dtype": "bf16 fp16 torch_dtype precision mixed_precision",
    "gradient_checkpointing": "enable_gradient_checkpointing activation_checkpointing",
    "activation_offloading": "enable_activation_offload enable_activation_offloading",
    "torch_compile": "compile use_torch_compile enable_compile compile_model",
    "cast_lm_head_to_fp32": "fp32_lm_head enable_fp32_lm_head lm_head_fp32",
    "optimizer.type": "optim optim_type",
    "fsdp.dp_replicate": "data_parallel_replicate_degree hsdp_replicate_size dp_replicate_size",
    "fsdp.offload_params": "offload param_offload cpu_offload offload_policy",
    "lora": "use_peft peft_config",
    "lora.rank": "lora_rank lora_r r",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.target_modules": "lora_target_modules",
    "mb_spec.max_tokens_per_mb": "gradient_accumulation_steps micro_batch_size micro_batch_size_per_gpu "
    "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
    "actor.algorithm": "adv_estimator advantage_estimator loss_type policy_loss loss_mode",
    "actor.kl_ctl": "beta kl_coef kl_loss_coef init_kl_coef kl_tau",
    "actor.kl_in": "use_kl_loss use_kl_in_reward",
    "actor.kl_estimator": "kl_loss_type kl_penalty",
    "actor.eps_clip": "epsilon clip_ratio cliprange clip_eps",
    "actor.eps_clip_higher": "epsilon_high clip_ratio_high eps_clip_high",
    "actor.c_clip": "clip_ratio_c delta",
    "actor.objective": "use_sapo_loss",
    "actor.sapo_tau_positive": "sapo_tau_pos sapo_temperature_pos",
    "actor.sapo_tau_negative": "sapo_tau_neg sapo_temperature_neg",
    "actor.reward_scale": "scale_rewards norm_adv_by_std_in_grpo reward_norm",
    "actor.aggregation": "loss_agg_mode token_level_loss",
    "actor.loss_constant": "loss_scale_factor",
    "actor.entropy_ctl": "entropy_coeff entropy_coef ent_coef",
    "actor.truncated": "mask_truncated_completions",
    "actor.overlong_buffer": "overlong_tokens overlong_reward_penalty",
    "actor.overlong_penalty": "overlong_penalty_factor",
    "actor.dynamic_sampling": "filter_groups use_dynamic_sampling",
    "actor.gae_lambda": "lam lambda",
    "actor.discount": "gamma",
    "critic.optimizer.lr": "critic_lr vf_coef value_loss_coef",
    "critic.value_eps_clip": "cliprange_value eps_clip_value",
    "critic_warmup_steps": "critic_warmup",
    "actor.proximal": "prox_logp_method",
    "actor.correction.action": "rejection_sampling behave_imp_weight_mode vllm_importance_sampling_mode",
    "actor.correction.upper": "importance_sampling_cap tis_imp_ratio_cap behave_imp_weight_cap "
    "vllm_importance_sampling_cap",
    "actor.sequence_mask_delta": "off_policy_mask_threshold",
    "actor.second_moment_limit": "m2_threshold",
    "actor.ppo_n_minibatches": "ppo_mini_batch_size num_mini_batches mini_batch_size num_iterations ppo_epochs",
    "gconfig.n_samples": "num_generations rollouts_per_example rollouts_per_prompt n n_resp_per_prompt num_samples",
    "gconfig.max_new_tokens": "max_completion_length max_response_length max_tokens response_length",
    "rollout.max_head_offpolicyness": "max_staleness max_async_level async_level max_off_policy_steps "
    "staleness_threshold",
    "rollout.server_addrs": "vllm_server_host vllm_server_base_url base_url",
    "allocation_mode": "use_vllm vllm_mode tensor_model_parallel_size tensor_parallel_size inference_gpu_ids "
    "vllm_tensor_parallel_size trainer_gpu_ids num_infer_gpus num_train_gpus",
    "vllm": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "train_dataset.path": "dataset_name train_files train_file dataset_path",
    "train_dataset.config_name": "dataset_config dataset_config_name",
    "train_dataset.split": "dataset_train_split dataset_split",
    "train_dataset.prompt_key": "input_key prompt_column",
    "train_dataset.answer_key": "label_key response_key",
    "valid_dataset.path": "val_files test_files eval_file",
    "train_dataset.batch_size": "train_batch_size per_device_train_batch_size global_batch_size rollout_batch_size",
    "train_dataset.max_length": "max_prompt_length max_seq_length seq_len",
    "reward": "reward_funcs reward_function custom_reward_function reward_fn reward_model rm_model reward_model_path",
    "total_train_steps": "max_steps total_training_steps num_steps total_steps",
    "total_train_epochs": "num_train_epochs total_epochs num_epochs",
    "experiment_name": "project_name",
    "trial_name": "run_name",
    "cluster.fileroot": "output_dir default_local_dir save_dir checkpoint_dir",
    "cluster.n_nodes": "nnodes num_nodes",
    "cluster.n_gpus_per_node": "num_gpus gpus_per_node",
    "saver.freq_steps": "save_steps save_freq save_interval",
    "evaluator.freq_steps": "eval_steps test_freq eval_interval",
    "recover.mode": "resume_from_checkpoint resume_mode resume",
    "recover.keep_last": "save_total_limit max_actor_ckpt_to_keep",
    "stats_logger": "report_to logger log_with",
    "stats_logger.line_freq_steps": "logging_steps log_interval",
}
"""By the end of our key."""

NOT_YET = {
    "an adapter that servers merge": "lora_name lora_delta_sync",
    "an adapter other than LoRA": "peft_type",
    "a quantized model": "load_in_4bit load_in_8bit",
    "splitting sequences over devices": "ulysses_sequence_parallel_size context_parallel_size sequence_parallel",
    "pipeline or expert parallel training": "pipeline_model_parallel_size expert_parallel_size",
    "an engine other than FSDP2": "megatron archon deepspeed zero_stage device_map distributed_executor_backend",
    "uploading models": "push_to_hub hub_model_id",
}
"""By what is not supported yet."""

_OURS = {theirs: ours for ours, words in THEIR_WORDS.items() for theirs in words.split()}
_MISSING = {theirs: feature for feature, words in NOT_YET.items() for theirs in words.split()}


def hint(name: str, keys: Mapping[str, ConfigKey]) -> str | None:
    """Return what an unknown key is called here; None if it resembles nothing."""
    leaf = name.rpartition(".")[2]
    if leaf in _MISSING:
        return f"Remove it: {_MISSING[leaf]} is not supported yet."
    if "critic" not in keys and (leaf == "critic" or _OURS.get(leaf, "").startswith("critic")):
        return "A critic is part of PPOConfig: use examples/arealite/gsm8k_ppo.py."
    ours = [key for key in keys if leaf in _OURS and f".{key}".endswith(f".{_OURS[leaf]}")]
    in_block = [key for key in ours if key.split(".")[0] == name.split(".")[0]]
    return f"It is called {(in_block or ours)[0]} here." if ours else guess(name, keys)


def guess(name: str, keys: Mapping[str, ConfigKey], *, cutoff: float = 0.7, has_namesakes: bool = True) -> str | None:
    """Return the key beside a name that it resembles, or those of the same name elsewhere."""
    parent, _, leaf = name.rpartition(".")
    siblings = {key.leaf: key.name for key in keys.values() if key.parent == parent}
    near = [siblings[one] for one in difflib.get_close_matches(leaf, siblings, n=1, cutoff=cutoff)]
    if has_namesakes and not near:
        near = [key.name for key in keys.values() if key.leaf == leaf][:3]
    return f"Did you mean {' or '.join(near)}?" if near else None
