"""TRL's `GRPOConfig` and `SFTConfig` with the model and data arguments of its scripts, as YAML or JSON; TRL 1.16.

TRL counts completions per device and optimizer steps; we count prompts of the whole run, and batches. Its files do not
say on how many devices they ran.
"""

from typing import Any

from arealite.api.config.schema import MISSING
from arealite.migrate.rules import (
    NOTHING,
    Because,
    Old,
    Rule,
    Tree,
    WithoutCounterpart,
    at_least_one,
    beside,
    name_of_run,
    name_of_trial,
    only,
    or_missing,
    part,
    split,
    switch_on,
)

GRPO_KEYS = (
    *("num_generations", "max_completion_length", "epsilon", "epsilon_high", "scale_rewards", "num_iterations"),
    *("steps_per_generation", "generation_batch_size", "use_vllm", "vllm_mode", "temperature", "reward_funcs"),
    *("reward_weights", "mask_truncated_completions", "vllm_importance_sampling_correction"),
)
"""Keys that tell GRPO from SFT."""
PREFERENCE_KEYS = ("f_divergence_type", "precompute_ref_log_probs", "center_rewards_coefficient", "desirable_weight")
"""Keys of trainers that have no table: DPO's, the reward model's and KTO's."""

_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_OPTIMIZERS = dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adam")
_OPTIMIZERS |= dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), "adam_8bit")


def _completions(old: Old) -> tuple[int, int]:
    """Return the completions that are sampled at a time, and those of an optimizer step."""
    step = old["per_device_train_batch_size"] * old.devices * old["gradient_accumulation_steps"]
    micro = old["per_device_train_batch_size"] * old.devices
    sampled = old["generation_batch_size"] or micro * (
        old["steps_per_generation"] or old["gradient_accumulation_steps"]
    )
    return max(sampled, step), step


def _minibatches(old: Old) -> int:
    sampled, step = _completions(old)
    return max(1, sampled // step)


def _updates(old: Old) -> int:
    """Return the optimizer steps of a batch."""
    return 1 if "num_generations" not in old.rules else _minibatches(old) * old["num_iterations"]


def _batch(_value: Any, old: Old) -> Tree:
    sampled, step = _completions(old)
    n = old["num_generations"]
    prompts = at_least_one(sampled / n)
    told = (
        f"prompts per step: {sampled} completions are sampled at a time "
        f"(per_device_train_batch_size {old['per_device_train_batch_size']}, {old.devices} devices: --devices) / {n}"
    )
    return {
        "train_dataset.batch_size": Because(prompts, told),
        "actor.ppo_n_minibatches": Because(
            min(_minibatches(old), prompts), f"optimizer steps per batch: {sampled} / {step} completions"
        ),
        "actor.mb_spec.n_mbs": Because(old["gradient_accumulation_steps"], "gradient_accumulation_steps"),
    }


def _batch_of_sft(_value: Any, old: Old) -> Tree:
    per_device, times = old["per_device_train_batch_size"], old["gradient_accumulation_steps"]
    told = f"rows per step: {per_device} per device * {times} * {old.devices} devices (--devices)"
    return {
        "train_dataset.batch_size": Because(per_device * times * old.devices, told),
        "model.mb_spec.n_mbs": Because(times, "gradient_accumulation_steps"),
    }


def _total_steps(value: Any, old: Old) -> Any:
    if value is None or value <= 0:
        return NOTHING
    updates = _updates(old)
    return (
        at_least_one(value / updates)
        if updates == 1
        else Because(at_least_one(value / updates), f"batches of {updates} optimizer steps, which TRL counts")
    )


def _warmup(block: str) -> Any:
    def make(value: Any, old: Old) -> Any:
        key = f"{block}.optimizer.warmup_steps_proportion"
        if value is None or old["lr_scheduler_type"] == "constant":
            return {key: Because(0.0, "constant has no warmup in TRL")}
        if value < 1:
            return {key: float(value)}
        if old["max_steps"] is not None and old["max_steps"] > 0:
            return {key: Because(min(1.0, value / old["max_steps"]), f"{value} of {old['max_steps']} steps")}
        return {key: Because(MISSING, f"{value} steps, as a share of all optimizer steps, which epochs decide")}

    return make


def _schedule(block: str) -> Any:
    def make(value: Any, old: Old) -> Any:
        if value not in _SCHEDULES:
            raise WithoutCounterpart("schedules are constant, linear and cosine")
        new: Tree = {f"{block}.optimizer.lr_scheduler_type": _SCHEDULES[value]}
        more = old["lr_scheduler_kwargs"] or {}
        if value == "cosine_with_min_lr" and isinstance(more, dict):
            ratio = more.get("min_lr_rate", more.get("min_lr", 0.0) / old["learning_rate"])
            new[f"{block}.optimizer.min_lr_ratio"] = Because(ratio, "lr_scheduler_kwargs")
        return new

    return make


def _dtype(value: Any, old: Old) -> Any:
    if old["fp16"]:
        return Because("bfloat16", "float16 needs loss scaling, which is not implemented")
    return "float32" if value is False else "bfloat16"


def _lora(block: str) -> Any:
    def make(value: Any, old: Old) -> Any:
        if not value:
            return NOTHING
        modules = old["lora_target_modules"] or "all-linear"
        is_one = isinstance(modules, list) and modules == ["all-linear"]
        new = {
            f"{block}.lora.rank": Because(old["lora_r"], "lora_r"),
            f"{block}.lora.alpha": Because(old["lora_alpha"], "lora_alpha"),
            f"{block}.lora.target_modules": Because("all-linear" if is_one else modules, "lora_target_modules"),
        }
        if block == "model":
            new["model.lora.dropout"] = Because(old["lora_dropout"], "lora_dropout")
        return new

    return make


def _save(value: Any, old: Old) -> Any:
    if value is None or old["save_strategy"] != "steps":
        return NOTHING
    if value < 1:
        raise WithoutCounterpart("steps between two are a number of steps: set saver.freq_steps")
    return {"saver.freq_steps": at_least_one(value / _updates(old))}


def _evaluate(value: Any, old: Old) -> Any:
    if value in ("no", None, False):
        return NOTHING
    new: Tree = {"valid_dataset.split": Because(old["dataset_test_split"], "dataset_test_split")}
    if value == "epoch":
        return new | {"evaluator.freq_epochs": 1}
    steps = old["eval_steps"] or old["logging_steps"]
    if steps < 1:
        raise WithoutCounterpart("eval_steps below 1 is a share of all steps: set evaluator.freq_steps")
    return new | {"evaluator.freq_steps": Because(at_least_one(steps / _updates(old)), f"eval_steps: {steps}")}


def _common(block: str, learning_rate: float, batch: Any) -> dict[str, Rule]:
    optimizer = f"{block}.optimizer"
    return {
        "project": Rule("experiment_name", default=None, make=name_of_run),
        "run_name": Rule("trial_name", default=None, make=name_of_trial),
        "model_name_or_path": Rule(f"{block}.path", default=None, make=or_missing),
        "dataset_name": Rule("train_dataset.path", default=None, make=or_missing),
        "dataset_config": Rule("train_dataset.config_name", default=None),
        "dataset_train_split": Rule("train_dataset.split"),
        "dataset_test_split": Rule("valid_dataset.split", default="test", make=part),
        "per_device_train_batch_size": Rule(
            f"train_dataset.batch_size, {block}.mb_spec.n_mbs", "", default=8, make=batch
        ),
        "gradient_accumulation_steps": Rule(f"{block}.mb_spec.n_mbs", default=1, make=part),
        "num_train_epochs": Rule("total_train_epochs", default=3.0, make=_epochs),
        "max_steps": Rule("total_train_steps", default=-1, make=_total_steps),
        "learning_rate": Rule(f"{optimizer}.lr", default=learning_rate),
        "weight_decay": Rule(f"{optimizer}.weight_decay", default=0.0),
        "adam_beta1": Rule(f"{optimizer}.beta1", default=0.9),
        "adam_beta2": Rule(f"{optimizer}.beta2", default=0.999),
        "adam_epsilon": Rule(f"{optimizer}.eps", default=1e-8),
        "max_grad_norm": Rule(f"{optimizer}.gradient_clipping", default=1.0, make=_clipping),
        "lr_scheduler_type": Rule(f"{optimizer}.lr_scheduler_type", default="linear", make=_schedule(block)),
        "lr_scheduler_kwargs": Rule(f"{optimizer}.min_lr_ratio", default=None, make=part),
        "warmup_ratio": Rule(f"{optimizer}.warmup_steps_proportion", make=_warmup(block)),
        "warmup_steps": Rule(f"{optimizer}.warmup_steps_proportion", default=0, make=_warmup(block)),
        "optim": Rule(
            f"{optimizer}.type", make=only(_OPTIMIZERS, "optimizers are AdamW, and AdamW with smaller moments")
        ),
        "bf16": Rule(f"{block}.dtype", default=None, make=_dtype),
        "fp16": Rule(f"{block}.dtype", default=False, make=part),
        "dtype": Rule("", "parameters are float32; bf16 says in which dtype is computed", default="float32"),
        "torch_dtype": Rule("", "parameters are float32; bf16 says in which dtype is computed", default="float32"),
        "gradient_checkpointing": Rule(f"{block}.gradient_checkpointing", default=True),
        "torch_compile": Rule(f"{block}.torch_compile", default=False),
        "attn_implementation": Rule(f"{block}.attn_impl", default=None),
        "use_peft": Rule(f"{block}.lora", default=False, make=_lora(block)),
        "lora_r": Rule(f"{block}.lora.rank", default=16, make=part),
        "lora_alpha": Rule(f"{block}.lora.alpha", default=32, make=part),
        "lora_dropout": Rule(f"{block}.lora.dropout", default=0.05, make=part),
        "lora_target_modules": Rule(f"{block}.lora.target_modules", default=None, make=part),
        "seed": Rule("seed", default=42),
        "output_dir": Rule("cluster.fileroot", "a folder of all runs"),
        "report_to": Rule("stats_logger.<service>.mode", default="none", make=lambda value, _: switch_on(value)),
        "logging_steps": Rule(
            "stats_logger.line_freq_steps", make=lambda value, old: at_least_one(value / _updates(old))
        ),
        "save_strategy": Rule("saver", default="steps", make=lambda value, _: _per_epoch(value)),
        "save_steps": Rule("saver.freq_steps", default=500, make=_save),
        "save_total_limit": Rule("", "the saver keeps all; recover.keep_last bounds the checkpoints to resume from"),
        "eval_strategy": Rule("evaluator, valid_dataset", default="no", make=_evaluate),
        "eval_steps": Rule("evaluator.freq_steps", default=None, make=part),
        "resume_from_checkpoint": Rule(
            "recover.mode",
            make=lambda value, _: {"recover.mode": "auto", "recover.freq_secs": 600} if value else NOTHING,
        ),
        "load_in_4bit": Rule("", "models are not quantized", default=False),
        "load_in_8bit": Rule("", "models are not quantized", default=False),
        "push_to_hub": Rule("", "models are not uploaded", default=False),
        "use_liger_kernel": Rule("", "kernels are PyTorch's", default=False),
        "neftune_noise_alpha": Rule("", "no noise is added to embeddings"),
        "gradient_checkpointing_kwargs": Rule("", "the layers are always recomputed without reentering"),
        "use_dora": Rule("", "adapters are LoRA's", default=False),
        "use_rslora": Rule("", "adapters are scaled by alpha / rank", default=False),
        "lora_modules_to_save": Rule("", "all but the adapters is frozen"),
        "dataset_streaming": Rule("", "data sets are read whole", default=False),
        "trust_remote_code": Rule("", "code of models is not run", default=False),
    }


def _epochs(value: Any, old: Old) -> Any:
    if old["max_steps"] is not None and old["max_steps"] > 0:
        return Because(at_least_one(value), "max_steps ends the run") if value > 1000 else at_least_one(value)
    return at_least_one(value) if value == int(value) else Because(at_least_one(value), f"whole epochs: {value}")


def _of_answers(value: Any, _old: Old) -> Any:
    if value is False:
        raise WithoutCounterpart("the loss is over answers only, not over prompts")
    return NOTHING


def _clipping(value: Any, _old: Old) -> Any:
    if not value:
        raise WithoutCounterpart("gradients are always clipped: set a large gradient_clipping")
    return value


def _per_epoch(value: Any) -> Any:
    return {"saver.freq_epochs": 1} if value == "epoch" else NOTHING


_LOSSES: dict[str, Tree] = {
    "dapo": {"actor.aggregation": "token_mean"},
    "bnpo": {"actor.aggregation": Because("token_mean", "tokens of the whole batch weigh equally, not of a device's")},
    "grpo": {"actor.aggregation": "sequence_mean"},
    "dr_grpo": {"actor.aggregation": "constant"},
    "sapo": {"actor.objective": "sapo", "actor.aggregation": "sequence_mean"},
    "cispo": {"actor.objective": "cispo", "actor.aggregation": "token_mean"},
}


def _loss(value: Any, _old: Old) -> Tree:
    if value not in _LOSSES:
        raise WithoutCounterpart(f"losses are those of TRL's {', '.join(_LOSSES)}, and others: docs/algorithms.md")
    return _LOSSES[value]


def _clips(old: Old) -> bool:
    return old["loss_type"] in ("dapo", "bnpo", "grpo", "dr_grpo")


def _upper(value: Any, old: Old) -> Any:
    if old["loss_type"] == "cispo":
        return {"actor.cispo_max": old["epsilon"] if value is None else value}
    return {"actor.eps_clip_higher": value} if _clips(old) and value is not None else NOTHING


def _level(value: Any, old: Old) -> Any:
    if value != "sequence":
        return NOTHING
    if old["loss_type"] != "grpo":
        raise WithoutCounterpart("one ratio per completion goes with the mean over completions: loss_type grpo")
    return {"actor.importance_sampling_level": "sequence"}


def _correction(value: Any, old: Old) -> Tree:
    """TRL corrects for vLLM's numerics; where it samples by itself there is nothing to correct for."""
    is_one_step = _updates(old) == 1
    told = "the policy before the update" + (", exact with one optimizer step" if is_one_step else "")
    new: Tree = {"actor.proximal": Because("current" if is_one_step else "recompute", told)}
    if not (value and old["use_vllm"]):
        return new
    level, _, action = old["vllm_importance_sampling_mode"].partition("_")
    upper, lower = old["vllm_importance_sampling_clip_max"], old["vllm_importance_sampling_clip_min"]
    if action == "truncate" and upper is None:
        raise WithoutCounterpart("a truncated weight needs an upper bound")
    new["actor.correction.action"] = Because(action, "vllm_importance_sampling_mode")
    is_sequence = level == "sequence" or old["importance_sampling_level"] == "sequence"
    new["actor.correction.level"] = Because("sequence" if is_sequence else "token", "vllm_importance_sampling_mode")
    new["actor.correction.upper"] = Because(upper, "vllm_importance_sampling_clip_max")
    if action == "mask" and lower is not None:
        new["actor.correction.lower"] = Because(lower, "vllm_importance_sampling_clip_min")
    return new


def _kl(value: Any, _old: Old) -> Any:
    if not value:
        return NOTHING
    told = "in the loss, as TRL's; the reference is the model before training"
    return {"actor.kl_ctl": value, "actor.kl_in": Because("loss", told), "actor.kl_estimator": "k3", "ref": {}}


def _allocation(value: Any, old: Old) -> Tree:
    if old["use_cpu"]:
        mode = Because("lite.d1+d1", "a CPU, whose server is the embedded one")
        return {"allocation_mode": mode, **split(0)}
    if value and old["vllm_mode"] == "server":
        size = old["vllm_tensor_parallel_size"]
        told = "vLLM has devices of its own, as `trl vllm-serve` had; the launcher starts it"
        mode = Because(f"vllm.d1p1t{size}+d{old.devices}p1t1", told)
        return {"allocation_mode": mode, **split(old.devices + size)}
    return {
        "allocation_mode": beside("vllm", old.devices, tensor=old["vllm_tensor_parallel_size"]),
        **split(old.devices),
    }


def _length(value: Any, old: Old) -> Tree:
    new: Tree = {"gconfig.max_new_tokens": value}
    is_embedded = old["use_cpu"] or (old.devices == 1 and not (old["use_vllm"] and old["vllm_mode"] == "server"))
    if is_embedded and value is not None and value >= 1536:
        new["lite.context"] = Because(value + 2048, "prompt and completion in the embedded server")
    return new


def _rewards(value: Any, old: Old) -> Any:
    told = "one completion at a time here, not lists: (prompt, completions, prompt_ids, completion_ids, **columns)"
    names = [value] if isinstance(value, str) else list(value or [])
    weights = old["reward_weights"] or [1.0] * len(names)
    if len(names) > 1 and len(weights) == len(names):
        return {"reward": Because(MISSING, f"{told}, with weights: {dict(zip(names, weights, strict=True))}")}
    return {"reward": Because(MISSING, f"FILE.py:FUNCTION; {told}")}


GRPO: dict[str, Rule] = {
    **_common("actor", 1e-6, _batch),
    "generation_batch_size": Rule("train_dataset.batch_size, actor.ppo_n_minibatches", default=None, make=part),
    "steps_per_generation": Rule("actor.ppo_n_minibatches", default=None, make=part),
    "num_iterations": Rule(
        "", "each sample is trained on once; actor.ppo_n_minibatches gives more optimizer steps", default=1
    ),
    "num_generations": Rule("gconfig.n_samples", default=8),
    "max_completion_length": Rule("gconfig.max_new_tokens, lite.context", default=512, make=_length),
    "max_prompt_length": Rule("train_dataset.max_length", "longer rows are left out, not cut"),
    "prompt (column)": Rule("train_dataset.prompt_key", default="prompt"),
    "reward_funcs": Rule("reward", default=None, make=_rewards),
    "reward_weights": Rule("reward", default=None, make=part),
    "temperature": Rule("gconfig.temperature", default=1.0),
    "top_p": Rule("gconfig.top_p", default=1.0),
    "top_k": Rule("gconfig.top_k", default=0, make=lambda value, _: value if value and value > 0 else NOTHING),
    "min_p": Rule("gconfig.min_p", default=None, make=lambda value, _: value or NOTHING),
    "repetition_penalty": Rule("", "the trainer could not reproduce the logprobs of such sampling", default=1.0),
    "beta": Rule("actor.kl_ctl, actor.kl_in, actor.kl_estimator, ref", default=0.0, make=_kl),
    "use_bias_correction_kl": Rule("", "the KL term is not weighed by the ratio", default=True),
    "epsilon": Rule("actor.eps_clip", default=0.2, make=lambda value, old: value if _clips(old) else NOTHING),
    "epsilon_high": Rule("actor.eps_clip_higher, actor.cispo_max", default=None, make=_upper),
    "delta": Rule("actor.c_clip", default=None),
    "loss_type": Rule("actor.aggregation, actor.objective", default="dapo", make=_loss),
    "importance_sampling_level": Rule("actor.importance_sampling_level", default="token", make=_level),
    "sapo_temperature_pos": Rule(
        "actor.sapo_tau_positive", default=1.0, make=lambda value, old: value if old["loss_type"] == "sapo" else NOTHING
    ),
    "sapo_temperature_neg": Rule(
        "actor.sapo_tau_negative",
        default=1.05,
        make=lambda value, old: value if old["loss_type"] == "sapo" else NOTHING,
    ),
    "scale_rewards": Rule(
        "actor.reward_scale",
        default="group",
        make=only(
            {"group": "group_std", True: "group_std", "batch": "batch_std", "none": "none", False: "none"},
            "rewards are scaled by the deviation of their group, of the batch, or not",
        ),
    ),
    "mask_truncated_completions": Rule(
        "actor.truncated", default=False, make=lambda value, _: "mask" if value else NOTHING
    ),
    "entropy_coef": Rule("actor.entropy_ctl", default=0.0),
    "off_policy_mask_threshold": Rule("actor.sequence_mask_delta", default=None),
    "cast_lm_head_to_fp32": Rule("actor.cast_lm_head_to_fp32", default=False),
    "disable_dropout": Rule("actor.disable_dropout", default=False, make=part),
    "shuffle_dataset": Rule("train_dataset.shuffle", default=True),
    "use_vllm": Rule("allocation_mode, cluster", default=False, make=_allocation),
    "use_cpu": Rule("cluster.n_gpus_per_node", default=False, make=part),
    "vllm_mode": Rule("allocation_mode", default="colocate", make=part),
    "vllm_tensor_parallel_size": Rule("allocation_mode", default=1, make=part),
    "vllm_gpu_memory_utilization": Rule(
        "", "servers have their GPUs to themselves; vllm.gpu_memory_utilization", default=0.3
    ),
    "vllm_max_model_length": Rule("vllm.max_model_len", default=None, make=lambda value, _: value or NOTHING),
    "vllm_server_base_url": Rule("", "the launcher starts servers; `trl vllm-serve` speaks another protocol"),
    "vllm_importance_sampling_correction": Rule("actor.proximal, actor.correction", default=True, make=_correction),
    "vllm_importance_sampling_mode": Rule("actor.correction", default="sequence_mask", make=part),
    "vllm_importance_sampling_clip_max": Rule("actor.correction.upper", default=3.0, make=part),
    "vllm_importance_sampling_clip_min": Rule("actor.correction.lower", default=None, make=part),
    "top_entropy_quantile": Rule("", "all trained tokens count, whatever their entropy", default=1.0),
    "use_adaptive_entropy": Rule("", "the entropy bonus has a constant weight", default=False),
    "sync_ref_model": Rule("", "the reference stays the model before training", default=False),
    "multi_objective_aggregation": Rule("", "rewards are summed before they are scaled", default="sum_then_normalize"),
    "max_tool_calling_iterations": Rule("", "a workflow bounds its turns: docs/workflows.md"),
    "log_completions": Rule("", "every trained sample is stored in the run folder's rollouts/", default=False),
}
"""Keys of GRPOConfig. The column is none: TRL's data sets have it."""

SFT: dict[str, Rule] = {
    **_common("model", 2e-5, _batch_of_sft),
    "max_length": Rule("train_dataset.max_length", "longer rows are left out, not cut", default=1024),
    "packing": Rule("", "micro-batches are always packed, and rows never see each other", default=False),
    "padding_free": Rule("", "micro-batches are always packed", default=False),
    "completion_only_loss": Rule("", "", make=_of_answers),
    "assistant_only_loss": Rule("", "", make=_of_answers),
    "dataset_text_field": Rule("", "rows are conversations, or a prompt and an answer", default="text"),
    "activation_offloading": Rule("model.activation_offloading", default=False),
    "loss_type": Rule(
        "",
        make=only({"nll": NOTHING, "chunked_nll": NOTHING}, "the loss is the negative log-likelihood"),
        default="nll",
    ),
    "shuffle_dataset": Rule("", "train_dataset.shuffle orders every epoch anew, as TRL's sampler does", default=False),
    "use_cpu": Rule(
        "allocation_mode, cluster",
        default=False,
        make=lambda value, old: {"allocation_mode": f"d{old.devices}", **split(0 if value else old.devices)},
    ),
}
"""Keys of SFTConfig."""

IGNORED = {
    "dataloader_*": "data sets are read whole into memory",
    "logging_*": "metrics.jsonl has every step",
    "log_*": "metrics.jsonl has every step",
    "hub_*": "models are not uploaded",
    "ddp_*": "the trainer is PyTorch's FSDP2",
    "fsdp*": "the trainer is PyTorch's FSDP2: actor.fsdp",
    "deepspeed": "the trainer is PyTorch's FSDP2",
    "vespo_*": "vespo is not implemented",
    "entropy_coef_*": "the entropy bonus has a constant weight",
    "ref_model_*": "the reference stays the model before training",
    "vllm_*": "options of vLLM servers stand in the block vllm",
    "do_*": "the script decides",
    "per_device_eval_batch_size": "an evaluation takes every row once",
    "bnb_*": "models are not quantized",
}
"""Patterns of keys that change no number of the run, and why they are gone."""
