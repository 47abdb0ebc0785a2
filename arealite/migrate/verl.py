"""verl's `ppo_trainer.yaml`: the tree that `--cfg job` prints or a part of it; main branch of October 2026.

verl gives all GPUs to servers and trainer in turn; here each side has GPUs of its own, and both work at the same time.
"""

from typing import Any

from arealite.api.config.schema import MISSING
from arealite.migrate.rules import (
    ABSENT,
    NOTHING,
    Because,
    Old,
    Rule,
    Tree,
    WithoutCounterpart,
    beside,
    name_of_run,
    name_of_trial,
    only,
    or_missing,
    part,
    switch_on,
)

_A, _R, _O = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.actor.optim"
_M, _F = "actor_rollout_ref.model", "actor_rollout_ref.actor.fsdp_config"

_WHITENED: Tree = {"actor.baseline": "none", "actor.reward_scale": "none", "actor.adv_norm": True}
_ESTIMATORS: dict[str, Tree] = {
    "gae": {"actor.algorithm": "ppo"},
    "grpo": {"actor.baseline": "group_mean"},
    "rloo": {"actor.baseline": "leave_one_out", "actor.reward_scale": "none", "actor.adv_norm": False},
    "reinforce_plus_plus": _WHITENED,
    "reinforce_plus_plus_baseline": _WHITENED | {"actor.baseline": "group_mean"},
}
_LOSSES: dict[str, Tree] = {
    "vanilla": {},
    "gspo": {"actor.importance_sampling_level": "sequence", "actor.aggregation": "sequence_mean"},
    "sapo": {"actor.objective": "sapo"},
    "cispo": {"actor.objective": "cispo"},
    "geo_mean": {"actor.objective": "gmpo", "actor.aggregation": "sequence_mean"},
}
_AGGREGATIONS: dict[str, Tree] = {
    "token-mean": {"actor.aggregation": "token_mean"},
    "seq-mean-token-mean": {"actor.aggregation": "sequence_mean"},
    "seq-mean-token-sum": {"actor.aggregation": "constant", "actor.loss_constant": 1.0},
    "seq-mean-token-sum-norm": {"actor.aggregation": "constant"},
}
_KL = {"low_var_kl": "k3", "k3": "k3", "k3+": "k2", "k2": "k2", "mse": "k2", "k1+": "k2"}
_NO_OTHER = "the ways to estimate advantages are in docs/algorithms.md"


def _estimator(value: Any, old: Old) -> Tree:
    if value not in _ESTIMATORS:
        raise WithoutCounterpart(_NO_OTHER)
    new = dict(_ESTIMATORS[value])
    if value == "grpo":
        is_scaled = old["algorithm.norm_adv_by_std_in_grpo"]
        new["actor.reward_scale"] = Because("group_std" if is_scaled else "none", "norm_adv_by_std_in_grpo")
    if value == "gae":
        new["actor.gae_lambda"] = Because(old["algorithm.lam"], "algorithm.lam")
    return new


def _minibatches(value: Any, old: Old) -> Because:
    batch, epochs = old["data.train_batch_size"], old[f"{_A}.ppo_epochs"]
    told = f"{batch} prompts / {value}: verl gives the size of a minibatch, this is their number"
    return Because(max(1, batch // value), told if epochs == 1 else f"{told}; {epochs} epochs over a batch become one")


def _is_gspo_or_gmpo(old: Old) -> bool:
    return old[f"{_A}.policy_loss.loss_mode"] in ("gspo", "geo_mean")


def _aggregation(value: Any, old: Old) -> Any:
    if value not in _AGGREGATIONS:
        raise WithoutCounterpart("aggregations are in docs/algorithms.md")
    if _is_gspo_or_gmpo(old):  # which the loss decides
        return NOTHING
    new = dict(_AGGREGATIONS[value])
    if value == "seq-mean-token-sum-norm" and old[f"{_A}.loss_scale_factor"] is not None:
        new["actor.loss_constant"] = Because(float(old[f"{_A}.loss_scale_factor"]), "loss_scale_factor")
    return new


def _loss(value: Any, old: Old) -> Any:
    if value not in _LOSSES:
        raise WithoutCounterpart("losses are in docs/algorithms.md")
    new = dict(_LOSSES[value])
    if value == "cispo":
        new["actor.cispo_max"] = Because(1 + old[f"{_A}.clip_ratio_high"], "1 + clip_ratio_high")
    if value == "sapo":
        taus = {"positive": "tau_pos", "negative": "tau_neg"}
        new |= {f"actor.sapo_tau_{sign}": Because(old[f"{_A}.{key}"], key) for sign, key in taus.items()}
    return new or NOTHING


def _clips(old: Old) -> bool:
    return old[f"{_A}.policy_loss.loss_mode"] in ("vanilla", "gspo")


def _clip(value: Any, old: Old) -> Any:
    if not _clips(old) or f"{_A}.clip_ratio_low" in old:
        return NOTHING
    told = "verl itself takes clip_ratio_low and clip_ratio_high, which stay 0.2 unless they are given, too"
    return {"actor.eps_clip": Because(value, told)}


def _if_clips(ours: str) -> Any:
    return lambda value, old: {ours: value} if _clips(old) else NOTHING


def _higher(value: Any, old: Old) -> Any:
    lower = old[f"{_A}.clip_ratio_low"] if f"{_A}.clip_ratio_low" in old else old[f"{_A}.clip_ratio"]
    return {"actor.eps_clip_higher": value} if _clips(old) and value != lower else NOTHING


def _kl_in_loss(value: Any, old: Old) -> Any:
    if not value:
        return NOTHING
    if old["algorithm.use_kl_in_reward"]:
        raise WithoutCounterpart("the KL penalty is in the rewards or in the loss: algorithm.use_kl_in_reward is true")
    kind = old[f"{_A}.kl_loss_type"]
    if kind not in _KL:
        told = f"kl_loss_type {kind} has an expected gradient of 0 near the reference; k3 does not"
    else:
        told = f"kl_loss_type {kind}"
    return {
        "actor.kl_ctl": Because(old[f"{_A}.kl_loss_coef"], "kl_loss_coef"),
        "actor.kl_in": "loss",
        "actor.kl_estimator": Because(_KL.get(kind, "k3"), told),
        "ref": {},
    }


def _kl_in_reward(value: Any, old: Old) -> Any:
    if not value:
        return NOTHING
    if old["algorithm.kl_ctrl.type"] != "fixed":
        told = "the weight of the penalty is constant: kl_ctrl.type adaptive has no counterpart"
    else:
        told = "algorithm.kl_ctrl.kl_coef"
    return {
        "actor.kl_ctl": Because(old["algorithm.kl_ctrl.kl_coef"], told),
        "actor.kl_in": "reward",
        "actor.kl_estimator": Because("k1", "the estimator whose gradient in rewards is that of the divergence"),
        "ref": {},
    }


def _proximal(value: Any, old: Old) -> Tree:
    """verl computes the logprobs of the policy before the update anew unless told to take the server's."""
    if value:
        return {"actor.proximal": Because("rollout", "bypass_mode: the server's logprobs")}
    size = old[f"{_A}.ppo_mini_batch_size"]
    is_one_step = old["data.train_batch_size"] <= size and old[f"{_A}.ppo_epochs"] == 1
    told = "the policy before the update" + (", exact with one optimizer step" if is_one_step else "")
    return {"actor.proximal": Because("current" if is_one_step else "recompute", told)}


def _correction(value: Any, old: Old) -> Any:
    if value is None:
        return NOTHING
    if value not in ("token", "sequence"):
        raise WithoutCounterpart("weights are of tokens or of sequences")
    upper = old["algorithm.rollout_correction.rollout_is_threshold"]
    if not isinstance(upper, (int, float)):
        raise WithoutCounterpart("a weight is truncated at one upper bound: set actor.correction.upper")
    return {
        "actor.correction.action": Because("truncate", "rollout_is"),
        "actor.correction.level": value,
        "actor.correction.upper": Because(upper, "rollout_is_threshold"),
    }


def _micro_batch(value: Any, old: Old) -> Any:
    if value is None or old[f"{_A}.use_dynamic_bsz"]:
        return NOTHING
    longest = old["data.max_prompt_length"] + old["data.max_response_length"]
    return {"actor.mb_spec.max_tokens_per_mb": Because(value * longest, f"{value} sequences of {longest} tokens")}


def _tokens(value: Any, old: Old) -> Any:
    return {"actor.mb_spec.max_tokens_per_mb": value} if old[f"{_A}.use_dynamic_bsz"] else NOTHING


def _files(value: Any, _old: Old) -> Any:
    files = value if isinstance(value, list) else [value]
    new: Tree = {"train_dataset.path": or_missing(files[0], _old)}
    if len(files) > 1:
        new["train_dataset.mixed_with"] = [{"path": one} for one in files[1:]]
    return new


def _valid(value: Any, _old: Old) -> Any:
    files = value if isinstance(value, list) else [value]
    if len(files) > 1:
        return {
            "valid_dataset.path": Because(files[0], f"one source is evaluated; not {', '.join(map(str, files[1:]))}")
        }
    return {"valid_dataset.path": files[0]} if value else NOTHING


def _reward(value: Any, old: Old) -> Any:
    told = "arguments change to (prompt, completions, prompt_ids, completion_ids, answer, **columns)"
    name = old["custom_reward_function.name"] or old["reward.custom_reward_function.name"]
    if value:
        return {"reward": Because(f"{value}:{name}", told)}
    if old["reward.custom_reward_function.path"]:
        return NOTHING
    return {"reward": Because(MISSING, f"FILE.py:FUNCTION; verl chooses one by data_source; {told}")}


def _or_reward(value: Any, old: Old) -> Any:
    return NOTHING if not value or old["custom_reward_function.path"] else _reward(value, old)


def _allocation(value: Any, old: Old) -> Tree:
    nodes, gpus = old["trainer.nnodes"], old["trainer.n_gpus_per_node"]
    servers = value if value in ("sglang", "vllm") else "sglang"
    mode = beside(servers, nodes * gpus, tensor=old[f"{_R}.tensor_model_parallel_size"])
    longest = old["data.max_prompt_length"] + old["data.max_response_length"]
    alone = {"lite.context": Because(longest, "the longest prompt and completion")} if nodes * gpus == 1 else {}
    return {"allocation_mode": mode, **alone}


def _greater(ours: str) -> Any:
    """Make a frequency, or nothing of -1."""
    return lambda value, _: {ours: value} if isinstance(value, int) and value > 0 else NOTHING


def _evaluations(value: Any, _old: Old) -> Any:
    return {"evaluator.freq_steps": value} if value and value > 0 else NOTHING


def _checkpoints(value: Any, old: Old) -> Any:
    if not value or value <= 0:
        return NOTHING
    new: Tree = {"saver.freq_steps": value}
    mode = {"auto": "auto", "resume_path": "resume"}.get(old["trainer.resume_mode"])
    return new | ({"recover.mode": Because(mode, "trainer.resume_mode"), "recover.freq_steps": value} if mode else {})


def _warmup(value: Any, old: Old) -> Any:
    if value is None or value < 0:
        return NOTHING
    key, total = "actor.optimizer.warmup_steps_proportion", old["trainer.total_training_steps"]
    if value and not total:
        return {key: Because(MISSING, f"{value} steps, as a share of all")}
    return {key: Because(value / total if value else 0.0, f"{value} of {total} steps")}


def _lora(value: Any, old: Old) -> Any:
    if not value:
        return NOTHING
    return {
        "actor.lora.rank": value,
        "actor.lora.alpha": Because(old[f"{_M}.lora_alpha"], "lora_alpha"),
        "actor.lora.target_modules": Because(old[f"{_M}.target_modules"], "target_modules"),
    }


def _offload(value: Any, _old: Old) -> Any:
    return {"actor.fsdp.offload_params": Because(True, "with the optimizer's state")} if value else NOTHING


def _shards(value: Any, old: Old) -> Any:
    if value is None or value <= 0:
        return NOTHING
    raise WithoutCounterpart("actor.fsdp.dp_replicate is the number of copies: the trainer's ranks / fsdp_size")


def _unless(off: Any, why: str) -> Rule:
    """Refuse anything but a value that switches it off."""
    return Rule("", why, default=off)


def _of_critic(ours: str, default: Any) -> Rule:
    def make(value: Any, old: Old) -> Any:
        return {ours: value} if old["algorithm.adv_estimator"] == "gae" else NOTHING

    return Rule(ours, default=default, make=make)


RULES: dict[str, Rule] = {
    "trainer.project_name": Rule("experiment_name", default=None, make=name_of_run),
    "trainer.experiment_name": Rule("trial_name", default=None, make=name_of_trial),
    "trainer.total_epochs": Rule("total_train_epochs", default=30),
    "trainer.total_training_steps": Rule("total_train_steps", default=None),
    "trainer.nnodes": Rule("cluster.n_nodes", default=1),
    "trainer.n_gpus_per_node": Rule("cluster.n_gpus_per_node", default=8),
    "trainer.logger": Rule("stats_logger.<service>.mode", make=lambda value, _: switch_on(value)),
    "trainer.save_freq": Rule("saver.freq_steps, recover.mode, recover.freq_steps", default=-1, make=_checkpoints),
    "trainer.resume_mode": Rule("recover.mode", default="auto", make=part),
    "trainer.max_actor_ckpt_to_keep": Rule("recover.keep_last", make=_greater("recover.keep_last")),
    "trainer.test_freq": Rule("evaluator.freq_steps", default=-1, make=_evaluations),
    "trainer.default_local_dir": Rule("cluster.fileroot", "a folder of all runs"),
    "trainer.critic_warmup": _of_critic("critic_warmup_steps", 0),
    "trainer.val_before_train": _unless(
        True, "an evaluation before the first step is part of every evaluator.freq_steps"
    ),
    "data.train_files": Rule("train_dataset.path, train_dataset.mixed_with", default=None, make=_files),
    "data.val_files": Rule("valid_dataset.path", default=None, make=_valid),
    "data.prompt_key": Rule("train_dataset.prompt_key", default="prompt"),
    "reward_model (column)": Rule(
        "train_dataset.answer_key",
        default="reward_model",
        make=lambda value, _: Because(
            value, "the column of verl's rows that holds {'ground_truth': ...}; the reward gets it as `answer`"
        ),
    ),
    "data.image_key": Rule("train_dataset.image_key", "verl takes images where a row has them"),
    "data.train_batch_size": Rule("train_dataset.batch_size", default=1024),
    "data.max_prompt_length": Rule("train_dataset.max_length", "longer rows are left out", default=512),
    "data.max_response_length": Rule("gconfig.max_new_tokens", default=512),
    "data.shuffle": Rule("train_dataset.shuffle", default=True),
    "data.seed": Rule("seed", default=None, make=lambda value, _: NOTHING if value is None else value),
    "data.train_max_samples": Rule("train_dataset.max_rows", make=_greater("train_dataset.max_rows")),
    "data.val_max_samples": Rule("valid_dataset.max_rows", make=_greater("valid_dataset.max_rows")),
    "data.filter_overlong_prompts": Rule("", "longer rows are always left out", default=True),
    "algorithm.adv_estimator": Rule(
        "actor.baseline, actor.reward_scale, actor.adv_norm, actor.algorithm, critic", default="gae", make=_estimator
    ),
    "algorithm.norm_adv_by_std_in_grpo": Rule("actor.reward_scale", default=True, make=part),
    "algorithm.gamma": Rule("actor.discount", default=1.0),
    "algorithm.lam": Rule("actor.gae_lambda", default=1.0, make=part),
    "algorithm.use_kl_in_reward": Rule("actor.kl_ctl, actor.kl_in, ref", default=False, make=_kl_in_reward),
    "algorithm.kl_ctrl.kl_coef": Rule("actor.kl_ctl", default=0.001, make=part),
    "algorithm.kl_ctrl.type": Rule("", default="fixed", make=part),
    "algorithm.kl_penalty": Rule("actor.kl_estimator", default="kl", make=part),
    "algorithm.filter_groups.enable": Rule(
        "actor.dynamic_sampling", default=False, make=lambda value, _: True if value else NOTHING
    ),
    "algorithm.rollout_correction.bypass_mode": Rule("actor.proximal", default=False, make=_proximal),
    "algorithm.rollout_correction.rollout_is": Rule("actor.correction", default=None, make=_correction),
    "algorithm.rollout_correction.rollout_is_threshold": Rule("actor.correction.upper", default=2.0, make=part),
    "algorithm.rollout_correction.rollout_rs": _unless(
        None, "actor.correction.action mask leaves tokens or completions out"
    ),
    f"{_M}.path": Rule("actor.path", default=None, make=or_missing),
    f"{_M}.tokenizer_path": Rule("tokenizer_path", make=lambda value, _: value or NOTHING),
    f"{_M}.enable_gradient_checkpointing": Rule("actor.gradient_checkpointing", default=True),
    f"{_M}.enable_activation_offload": Rule("actor.activation_offloading", default=False),
    f"{_M}.lora_rank": Rule("actor.lora", default=0, make=_lora),
    f"{_M}.lora_alpha": Rule("actor.lora.alpha", default=16, make=part),
    f"{_M}.target_modules": Rule("actor.lora.target_modules", default="all-linear", make=part),
    f"{_M}.use_remove_padding": Rule("", "micro-batches are always packed", default=True),
    f"{_M}.trust_remote_code": _unless(False, "code of models is not run"),
    f"{_M}.use_liger": _unless(False, "kernels are PyTorch's"),
    f"{_A}.ppo_mini_batch_size": Rule("actor.ppo_n_minibatches", default=256, make=_minibatches),
    f"{_A}.ppo_epochs": Rule("", default=1, make=part),
    f"{_A}.ppo_micro_batch_size_per_gpu": Rule("actor.mb_spec.max_tokens_per_mb", default=None, make=_micro_batch),
    f"{_A}.ppo_max_token_len_per_gpu": Rule("actor.mb_spec.max_tokens_per_mb", default=16384, make=_tokens),
    f"{_A}.use_dynamic_bsz": Rule("actor.mb_spec.max_tokens_per_mb", default=False, make=part),
    f"{_A}.clip_ratio": Rule("actor.eps_clip", default=0.2, make=_clip),
    f"{_A}.clip_ratio_low": Rule("actor.eps_clip", default=0.2, make=_if_clips("actor.eps_clip")),
    f"{_A}.clip_ratio_high": Rule("actor.eps_clip_higher", default=0.2, make=_higher),
    f"{_A}.clip_ratio_c": Rule("actor.c_clip", default=3.0, make=_if_clips("actor.c_clip")),
    f"{_A}.loss_agg_mode": Rule("actor.aggregation, actor.loss_constant", default="token-mean", make=_aggregation),
    f"{_A}.loss_scale_factor": Rule("actor.loss_constant", default=None, make=part),
    f"{_A}.policy_loss.loss_mode": Rule("actor.objective", default="vanilla", make=_loss),
    f"{_A}.tau_pos": Rule("actor.sapo_tau_positive", default=1.0, make=part),
    f"{_A}.tau_neg": Rule("actor.sapo_tau_negative", default=1.05, make=part),
    f"{_A}.entropy_coeff": Rule("actor.entropy_ctl", default=0),
    f"{_A}.use_kl_loss": Rule("actor.kl_ctl, actor.kl_in, actor.kl_estimator, ref", default=False, make=_kl_in_loss),
    f"{_A}.kl_loss_coef": Rule("actor.kl_ctl", default=0.001, make=part),
    f"{_A}.kl_loss_type": Rule("actor.kl_estimator", default="low_var_kl", make=part),
    f"{_A}.grad_clip": Rule("actor.optimizer.gradient_clipping", default=1.0),
    f"{_A}.strategy": Rule("", make=only(dict.fromkeys(("fsdp", "fsdp2"), NOTHING), "the trainer is PyTorch's FSDP2")),
    f"{_A}.ulysses_sequence_parallel_size": _unless(1, "sequences are not split over devices"),
    f"{_F}.param_offload": Rule("actor.fsdp.offload_params", default=False, make=_offload),
    f"{_F}.offload_policy": Rule("actor.fsdp.offload_params", default=False, make=_offload),
    f"{_F}.optimizer_offload": _unless(False, "actor.fsdp.offload_params offloads parameters and optimizer together"),
    f"{_F}.fsdp_size": Rule("actor.fsdp.dp_replicate", default=-1, make=_shards),
    f"{_O}.lr": Rule("actor.optimizer.lr", default=1e-6),
    f"{_O}.weight_decay": Rule("actor.optimizer.weight_decay", default=0.01),
    f"{_O}.betas": Rule(
        "actor.optimizer.beta1, actor.optimizer.beta2",
        default=[0.9, 0.999],
        make=lambda value, _: {"actor.optimizer.beta1": value[0], "actor.optimizer.beta2": value[1]},
    ),
    f"{_O}.lr_warmup_steps": Rule("actor.optimizer.warmup_steps_proportion", make=_warmup),
    f"{_O}.lr_warmup_steps_ratio": Rule("actor.optimizer.warmup_steps_proportion", default=0.0),
    f"{_O}.min_lr_ratio": Rule("actor.optimizer.min_lr_ratio", default=0.0),
    f"{_O}.lr_scheduler_type": Rule(
        "actor.optimizer.lr_scheduler_type",
        default="constant",
        make=only({"constant": "constant", "cosine": "cosine"}, "schedules are constant, linear and cosine"),
    ),
    f"{_O}.warmup_style": Rule(
        "actor.optimizer.lr_scheduler_type",
        make=lambda value, _: value if value in ("constant", "cosine") else NOTHING,
    ),
    f"{_R}.name": Rule("allocation_mode", default=None, make=_allocation),
    f"{_R}.tensor_model_parallel_size": Rule("allocation_mode", default=2, make=part),
    f"{_R}.n": Rule("gconfig.n_samples", default=1),
    f"{_R}.temperature": Rule("gconfig.temperature", default=1.0),
    f"{_R}.top_p": Rule("gconfig.top_p", default=1),
    f"{_R}.top_k": Rule("gconfig.top_k", default=-1, make=_greater("gconfig.top_k")),
    f"{_R}.gpu_memory_utilization": Rule("", "servers have their GPUs to themselves"),
    f"{_R}.multi_turn.enable": _unless(False, "a workflow has turns and tools: docs/workflows.md"),
    f"{_R}.val_kwargs.temperature": Rule(
        "eval_gconfig.temperature",
        default=0,
        make=lambda value, _: {"eval_gconfig.greedy": False, "eval_gconfig.temperature": value} if value else NOTHING,
    ),
    f"{_R}.val_kwargs.n": Rule("eval_gconfig.n_samples", default=1),
    "critic.model.path": _of_critic("critic.path", ABSENT),
    "critic.optim.lr": _of_critic("critic.optimizer.lr", 1e-5),
    "critic.optim.weight_decay": _of_critic("critic.optimizer.weight_decay", 0.01),
    "critic.cliprange_value": _of_critic("critic.value_eps_clip", 0.5),
    "custom_reward_function.path": Rule("reward", default=None, make=_reward),
    "custom_reward_function.name": Rule("reward", default=None, make=part),
    "reward.custom_reward_function.path": Rule("reward", default=None, make=_or_reward),
    "reward.custom_reward_function.name": Rule("reward", default="compute_score", make=part),
    "reward_model.enable": _unless(False, "a reward model is a function that asks it: docs/data-and-rewards.md"),
    "reward.reward_model.enable": _unless(False, "a reward model is a function that asks it: docs/data-and-rewards.md"),
    "reward_model.overlong_buffer.enable": Rule("actor.overlong_buffer", default=False, make=part),
    "reward_model.overlong_buffer.len": Rule(
        "actor.overlong_buffer",
        default=0,
        make=lambda value, old: (
            {"actor.overlong_buffer": value} if old["reward_model.overlong_buffer.enable"] else NOTHING
        ),
    ),
    "reward_model.overlong_buffer.penalty_factor": Rule("actor.overlong_penalty", default=1.0),
}
"""By the dotted key of the tree."""

IGNORED = {
    "*_target_": "hydra's, for classes of verl",
    "*profiler*": "perf_trace: true traces all processes of a run",
    "*log_prob_*": "forward passes are split as mb_spec says",
    "*router_replay*": "mixtures of experts are not trained",
    "*checkpoint*": "checkpoints hold all that a run needs to resume",
    "*.qat*": "models are not quantized",
    "*turbo_config*": "the trainer is PyTorch's FSDP2",
    "*megatron*": "the trainer is PyTorch's FSDP2",
    f"{_F}.*": "the trainer is PyTorch's FSDP2: actor.fsdp",
    f"{_A}.*": "no choice here, or one with another key: docs/algorithms.md",
    f"{_O}.*": "no choice here",
    "actor_rollout_ref.ref.*": "the reference follows the actor",
    "actor_rollout_ref.hybrid_engine": "servers and trainer have GPUs of their own, or share one: lite.d1|d1",
    "actor_rollout_ref.nccl_timeout": "every wait has a deadline of its own",
    f"{_R}.val_kwargs.*": "eval_gconfig follows gconfig",
    f"{_R}.*": "options of servers stand in the blocks sglang and vllm, and pass through",
    f"{_M}.*": "no choice here",
    "critic.*": "the critic follows the actor",
    "data.*": "data sets: docs/data-and-rewards.md",
    "algorithm.*": "no choice here: docs/algorithms.md",
    "reward_model.*": "rewards are functions: docs/data-and-rewards.md",
    "reward.*": "rewards are functions: docs/data-and-rewards.md",
    "custom_reward_function.*": "rewards are functions: docs/data-and-rewards.md",
    "sandbox_fusion.*": "arealite.reward has a sandbox of its own",
    "distillation.*": "on-policy distillation: actor.algorithm opd with a teacher block",
    "transfer_queue.*": "batches are tensors in rank 0",
    "global_profiler.*": "perf_trace: true traces all processes of a run",
    "trainer.*": "no choice here",
    "ray_*": "the launcher starts processes",
    "skip.*": "every trained sample is stored in the run folder's rollouts/",
    "defaults": "hydra's groups are not read: give what `--cfg job` prints",
    "hydra.*": "hydra is not used",
}
"""Patterns of keys that have no place here, and why."""
