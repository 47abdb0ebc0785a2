"""verl's `ppo_trainer.yaml`: the tree that `--cfg job` prints or a part of it; main branch of October 2026.

verl gives all GPUs to servers and trainer in turn; here each side has GPUs of its own, and both work at the same time.
"""

from arealite.migrate import rules
from arealite.migrate import verl_values as values
from arealite.migrate.rules import ABSENT, Rule, part_of, patterns, unless
from arealite.migrate.verl_values import ACTOR, FSDP, MODEL, OPTIM, ROLLOUT

_NO_MODEL = unless(False, "a reward model is a function that asks it: docs/data-and-rewards.md")
_OF_REWARDS = "reward_model.* reward_manager.* reward.*"
_ALWAYS = "an evaluation before the first step is part of every evaluator.freq_steps"

RULES: dict[str, Rule] = {
    "trainer.project_name": Rule("experiment_name", None, rules.name_of_run),
    "trainer.experiment_name": Rule("trial_name", None, rules.name_of_trial),
    "trainer.total_epochs": Rule("total_train_epochs", 30),
    "trainer.total_training_steps": Rule("total_train_steps", None),
    "trainer.nnodes": Rule("cluster.n_nodes", 1),
    "trainer.n_gpus_per_node": Rule("cluster.n_gpus_per_node", 8),
    "trainer.logger": Rule("stats_logger.<service>.mode", make=rules.switch_on),
    "trainer.save_freq": Rule("saver.freq_steps, recover.mode, recover.freq_steps", -1, values.checkpoints),
    "trainer.resume_mode": part_of("recover.mode", "auto"),
    "trainer.max_actor_ckpt_to_keep": Rule("recover.keep_last", make=rules.if_positive),
    "trainer.test_freq": Rule("evaluator.freq_steps", -1, rules.if_positive),
    "trainer.default_local_dir": Rule("cluster.fileroot", why="a folder of all runs"),
    "trainer.critic_warmup": Rule("critic_warmup_steps", 0, values.if_critic),
    "trainer.val_before_train": unless(True, _ALWAYS),
    "data.train_files": Rule("train_dataset.path, train_dataset.mixed_with", None, values.files),
    "data.val_files": Rule("valid_dataset.path", None, values.valid),
    "data.prompt_key": Rule("train_dataset.prompt_key", "prompt"),
    "reward_model (column)": Rule("train_dataset.answer_key", "reward_model", values.answers),
    "data.image_key": Rule("train_dataset.image_key", why="verl takes images where a row has them"),
    "data.train_batch_size": Rule("train_dataset.batch_size", 1024),
    "data.max_prompt_length": Rule("train_dataset.max_length", 512, why="longer rows are left out"),
    "data.max_response_length": Rule("gconfig.max_new_tokens", 512),
    "data.shuffle": Rule("train_dataset.shuffle", True),
    "data.seed": Rule("seed", None, rules.if_given),
    "data.train_max_samples": Rule("train_dataset.max_rows", make=rules.if_positive),
    "data.val_max_samples": Rule("valid_dataset.max_rows", make=rules.if_positive),
    "data.filter_overlong_prompts": unless(True, "longer rows are always left out"),
    "algorithm.adv_estimator": Rule(
        "actor.baseline, actor.reward_scale, actor.adv_norm, actor.algorithm, critic", "gae", values.estimator
    ),
    "algorithm.norm_adv_by_std_in_grpo": part_of("actor.reward_scale", True),
    "algorithm.gamma": Rule("actor.discount", 1.0),
    "algorithm.lam": part_of("actor.gae_lambda", 1.0),
    "algorithm.use_kl_in_reward": Rule("actor.kl_ctl, actor.kl_in, ref", False, values.kl_in_reward),
    "algorithm.kl_ctrl.kl_coef": part_of("actor.kl_ctl", 0.001),
    "algorithm.kl_ctrl.type": part_of("", "fixed"),
    "algorithm.kl_penalty": part_of("actor.kl_estimator", "kl"),
    "algorithm.filter_groups.enable": Rule("actor.dynamic_sampling", False, values.on),
    "algorithm.rollout_correction.bypass_mode": Rule("actor.proximal", False, values.proximal),
    "algorithm.rollout_correction.rollout_is": Rule("actor.correction", None, values.correction),
    "algorithm.rollout_correction.rollout_is_threshold": part_of("actor.correction.upper", 2.0),
    "algorithm.rollout_correction.rollout_rs": unless(
        None, "actor.correction.action mask leaves tokens or completions out"
    ),
    f"{MODEL}.path": Rule("actor.path", None, rules.or_missing),
    f"{MODEL}.tokenizer_path": Rule("tokenizer_path", make=rules.if_true),
    f"{MODEL}.enable_gradient_checkpointing": Rule("actor.gradient_checkpointing", True),
    f"{MODEL}.enable_activation_offload": Rule("actor.activation_offloading", False),
    f"{MODEL}.lora_rank": Rule("actor.lora", 0, values.lora),
    f"{MODEL}.lora_alpha": part_of("actor.lora.alpha", 16),
    f"{MODEL}.target_modules": part_of("actor.lora.target_modules", "all-linear"),
    f"{MODEL}.use_remove_padding": unless(True, "micro-batches are always packed"),
    f"{MODEL}.trust_remote_code": unless(False, "code of models is not run"),
    f"{MODEL}.use_liger": unless(False, "kernels are PyTorch's"),
    f"{ACTOR}.ppo_mini_batch_size": Rule("actor.ppo_n_minibatches", 256, values.minibatches),
    f"{ACTOR}.ppo_epochs": part_of("", 1),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": Rule("actor.mb_spec.max_tokens_per_mb", None, values.micro_batch),
    f"{ACTOR}.ppo_max_token_len_per_gpu": Rule("actor.mb_spec.max_tokens_per_mb", 16384, values.tokens),
    f"{ACTOR}.use_dynamic_bsz": part_of("actor.mb_spec.max_tokens_per_mb", False),
    f"{ACTOR}.clip_ratio": Rule("actor.eps_clip", 0.2, values.clip),
    f"{ACTOR}.clip_ratio_low": Rule("actor.eps_clip", 0.2, values.if_clips),
    f"{ACTOR}.clip_ratio_high": Rule("actor.eps_clip_higher", 0.2, values.higher),
    f"{ACTOR}.clip_ratio_c": Rule("actor.c_clip", 3.0, values.if_clips),
    f"{ACTOR}.loss_agg_mode": Rule("actor.aggregation, actor.loss_constant", "token-mean", values.aggregation),
    f"{ACTOR}.loss_scale_factor": part_of("actor.loss_constant", None),
    f"{ACTOR}.policy_loss.loss_mode": Rule("actor.objective", "vanilla", values.loss),
    f"{ACTOR}.tis_imp_ratio_cap": Rule("actor.correction", -1, values.truncation),
    f"{ACTOR}.tau_pos": part_of("actor.sapo_tau_positive", 1.0),
    f"{ACTOR}.tau_neg": part_of("actor.sapo_tau_negative", 1.05),
    f"{ACTOR}.entropy_coeff": Rule("actor.entropy_ctl", 0),
    f"{ACTOR}.use_kl_loss": Rule("actor.kl_ctl, actor.kl_in, actor.kl_estimator, ref", False, values.kl_in_loss),
    f"{ACTOR}.kl_loss_coef": part_of("actor.kl_ctl", 0.001),
    f"{ACTOR}.kl_loss_type": part_of("actor.kl_estimator", "low_var_kl"),
    f"{ACTOR}.grad_clip": Rule("actor.optimizer.gradient_clipping", 1.0),
    f"{ACTOR}.strategy": Rule("", make=values.strategy),
    f"{ACTOR}.ulysses_sequence_parallel_size": unless(1, "sequences are not split over devices"),
    f"{FSDP}.param_offload": Rule("actor.fsdp.offload_params", False, values.offload),
    f"{FSDP}.offload_policy": Rule("actor.fsdp.offload_params", False, values.offload),
    f"{FSDP}.optimizer_offload": unless(False, "fsdp.offload_params offloads parameters and optimizer together"),
    f"{FSDP}.fsdp_size": Rule("actor.fsdp.dp_replicate", -1, values.shards),
    f"{OPTIM}.optimizer": Rule("", make=values.optimizer),
    f"{OPTIM}.lr": Rule("actor.optimizer.lr", 1e-06),
    f"{OPTIM}.weight_decay": Rule("actor.optimizer.weight_decay", 0.01),
    f"{OPTIM}.betas": Rule("actor.optimizer.beta1, actor.optimizer.beta2", [0.9, 0.999], values.betas),
    f"{OPTIM}.lr_warmup_steps": Rule("actor.optimizer.warmup_steps_proportion", make=values.warmup),
    f"{OPTIM}.lr_warmup_steps_ratio": Rule("actor.optimizer.warmup_steps_proportion", 0.0),
    f"{OPTIM}.min_lr_ratio": Rule("actor.optimizer.min_lr_ratio", 0.0),
    f"{OPTIM}.lr_scheduler_type": Rule("actor.optimizer.lr_scheduler_type", "constant", values.schedule),
    f"{OPTIM}.warmup_style": Rule("actor.optimizer.lr_scheduler_type", make=values.if_schedule),
    f"{ROLLOUT}.name": Rule("allocation_mode", None, values.allocation),
    f"{ROLLOUT}.tensor_model_parallel_size": part_of("allocation_mode", 2),
    f"{ROLLOUT}.n": Rule("gconfig.n_samples", 1),
    f"{ROLLOUT}.temperature": Rule("gconfig.temperature", 1.0),
    f"{ROLLOUT}.top_p": Rule("gconfig.top_p", 1),
    f"{ROLLOUT}.top_k": Rule("gconfig.top_k", -1, rules.if_positive),
    f"{ROLLOUT}.gpu_memory_utilization": unless(None, "servers have their GPUs to themselves"),
    f"{ROLLOUT}.multi_turn.enable": unless(False, "a workflow has turns and tools: docs/workflows.md"),
    f"{ROLLOUT}.val_kwargs.temperature": Rule("eval_gconfig.temperature", 0, values.temperature),
    f"{ROLLOUT}.val_kwargs.n": Rule("eval_gconfig.n_samples", 1),
    "critic.model.path": Rule("critic.path", ABSENT, values.if_critic),
    "critic.optim.lr": Rule("critic.optimizer.lr", 1e-5, values.if_critic),
    "critic.optim.weight_decay": Rule("critic.optimizer.weight_decay", 0.01, values.if_critic),
    "critic.cliprange_value": Rule("critic.value_eps_clip", 0.5, values.if_critic),
    "custom_reward_function.path": Rule("reward", None, values.reward),
    "custom_reward_function.name": part_of("reward", None),
    "reward.custom_reward_function.path": Rule("reward", None, values.or_reward),
    "reward.custom_reward_function.name": part_of("reward", "compute_score"),
    **dict.fromkeys(("reward_model.enable", "reward.reward_model.enable"), _NO_MODEL),
    "reward_model.overlong_buffer.enable": part_of("actor.overlong_buffer", False),
    "reward_model.overlong_buffer.len": Rule("actor.overlong_buffer", 0, values.overlong),
    "reward_model.overlong_buffer.penalty_factor": Rule("actor.overlong_penalty", 1.0),
}
"""By the dotted key of the tree."""
ALIASES = {
    f"{block}.{name}": f"reward_model.overlong_buffer.{name.rpartition('.')[2]}"
    for block, buffer in (
        ("reward_model", "reward_kwargs.overlong_buffer_cfg"),
        ("reward", "reward_kwargs.overlong_buffer_cfg"),
        ("custom_reward_function", "overlong_buffer"),
    )
    for name in (f"{buffer}.enable", f"{buffer}.len", f"{buffer}.penalty_factor")
}
"""Other places of keys, in the releases of verl and its recipe for DAPO."""
IGNORED = patterns(
    {
        "hydra's, for classes of verl": "*_target_",
        "perf_trace: true traces all processes of a run": "*profiler*",
        "forward passes are split as mb_spec says": "*log_prob_*",
        "the servers' choice of experts is not replayed": "*router_replay*",
        "checkpoints hold all that a run needs to resume": "*checkpoint*",
        "models are not quantized": "*.qat*",
        "the trainer is PyTorch's FSDP2": "*turbo_config* *megatron*",
        "the trainer is PyTorch's FSDP2: actor.fsdp": f"{FSDP}.*",
        "no choice here, or one with another key: docs/algorithms.md": f"{ACTOR}.*",
        "the reference follows the actor": "actor_rollout_ref.ref.*",
        "servers and trainer have GPUs of their own, or share one: lite.d1|d1": "actor_rollout_ref.hybrid_engine",
        "every wait has a deadline of its own": "actor_rollout_ref.nccl_timeout",
        "eval_gconfig follows gconfig": f"{ROLLOUT}.val_kwargs.*",
        "options of servers stand in the blocks sglang and vllm, and pass through": f"{ROLLOUT}.*",
        "no choice here": f"{MODEL}.* trainer.*",
        "the critic follows the actor": "critic.*",
        "data sets: docs/data-and-rewards.md": "data.*",
        "no choice here: docs/algorithms.md": "algorithm.*",
        "rewards are functions: docs/data-and-rewards.md": f"{_OF_REWARDS} custom_reward_function.*",
        "arealite.reward has a sandbox of its own": "sandbox_fusion.*",
        "on-policy distillation: actor.algorithm opd with a teacher block": "distillation.*",
        "batches are tensors in rank 0": "transfer_queue.*",
        "the launcher starts processes": "ray_*",
        "every trained sample is stored in the run folder's rollouts/": "skip.*",
        "hydra's groups are not read: give what `--cfg job` prints": "defaults",
        "hydra is not used": "hydra.*",
    }
)
"""Patterns of keys that have no place here, by why."""
