"""How values of TRL's keys become ours: completions per device, optimizer steps, losses and corrections."""

from typing import Any

from arealite.api.config.types import MISSING
from arealite.migrate import rules
from arealite.migrate.rules import NOTHING, Because, MustDecide, Old, Tree, WithoutCounterpart, at_least_one

_SCHEDULES = {one: one for one in ("linear", "cosine", "constant")}
_SCHEDULES |= {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}
_OPTIMIZERS = dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adam")
_OPTIMIZERS |= dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), "adam_8bit")
optimizer = rules.only(_OPTIMIZERS, "optimizers are AdamW, and AdamW with smaller moments")
loss_of_sft = rules.only(dict.fromkeys(("nll", "chunked_nll"), NOTHING), "the loss is the negative log-likelihood")
scale = rules.only(
    {"group": "group_std", True: "group_std", "batch": "batch_std", "none": "none", False: "none"},
    "rewards are scaled by the deviation of their group, of the batch, or not",
)


def _block(old: Old) -> str:
    """Return the block of ours that is trained."""
    return "actor" if "num_generations" in old.rules else "model"


def _completions(old: Old) -> tuple[int, int]:
    """Return the completions that are sampled at a time, and those of an optimizer step."""
    micro, times = old["per_device_train_batch_size"] * old.devices, old["gradient_accumulation_steps"]
    sampled = old["generation_batch_size"] or micro * (old["steps_per_generation"] or times)
    return max(sampled, micro * times), micro * times


def _minibatches(old: Old) -> int:
    sampled, step = _completions(old)
    return max(1, sampled // step)


def updates(old: Old) -> int:
    """Return the optimizer steps of a batch."""
    return _minibatches(old) * old["num_iterations"] if _block(old) == "actor" else 1


def batches(value: Any, old: Old) -> int:
    """Count batches where TRL counts optimizer steps."""
    return at_least_one(value / updates(old))


def batch(_value: Any, old: Old) -> Tree:
    """Count prompts of the run where TRL counts completions per device."""
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


def batch_of_sft(_value: Any, old: Old) -> Tree:
    """Count rows of the run where TRL counts rows per device."""
    per_device, times = old["per_device_train_batch_size"], old["gradient_accumulation_steps"]
    told = f"rows per step: {per_device} per device * {times} * {old.devices} devices (--devices)"
    return {
        "train_dataset.batch_size": Because(per_device * times * old.devices, told),
        "model.mb_spec.n_mbs": Because(times, "gradient_accumulation_steps"),
    }


def total_steps(value: Any, old: Old) -> Any:
    """Count batches, if the number of steps is bounded."""
    if value is None or value <= 0:
        return NOTHING
    count, steps = updates(old), batches(value, old)
    return steps if count == 1 else Because(steps, f"batches of {count} optimizer steps, which TRL counts")


def warmup(value: Any, old: Old) -> Any:
    """Make a share of all steps of a share, or of a number of steps."""
    if value is None or old["lr_scheduler_type"] == "constant":
        return Because(0.0, "constant has no warmup in TRL")
    if value < 1:
        return float(value)
    return rules.share_of_steps(value, old["max_steps"], " optimizer steps, which epochs decide")


def schedule(value: Any, old: Old) -> Tree:
    """Name the shape, and the lowest learning rate of one that has it."""
    if value not in _SCHEDULES:
        raise MustDecide("schedules are constant, linear and cosine")
    key, more = f"{_block(old)}.optimizer", old["lr_scheduler_kwargs"] or {}
    new: Tree = {f"{key}.lr_scheduler_type": _SCHEDULES[value]}
    if value == "cosine_with_min_lr" and isinstance(more, dict):
        ratio = more.get("min_lr_rate", more.get("min_lr", 0.0) / old["learning_rate"])
        new[f"{key}.min_lr_ratio"] = Because(ratio, "lr_scheduler_kwargs")
    return new


def dtype(value: Any, old: Old) -> Any:
    """Name the dtype of compute."""
    if old["fp16"]:
        return Because("bfloat16", "float16 needs loss scaling, which is not implemented")
    return "float32" if value is False else "bfloat16"


def lora(value: Any, old: Old) -> Any:
    """Make a block of LoRA of `use_peft` and its keys."""
    if not value:
        return NOTHING
    key, modules = f"{_block(old)}.lora", old["lora_target_modules"] or "all-linear"
    new = {
        f"{key}.rank": Because(old["lora_r"], "lora_r"),
        f"{key}.alpha": Because(old["lora_alpha"], "lora_alpha"),
        f"{key}.target_modules": Because("all-linear" if modules == ["all-linear"] else modules, "lora_target_modules"),
    }
    if _block(old) == "model":
        new[f"{key}.dropout"] = Because(old["lora_dropout"], "lora_dropout")
    return new


def save(value: Any, old: Old) -> Any:
    """Make a frequency in steps."""
    if value is None or old["save_strategy"] != "steps":
        return NOTHING
    if value < 1:
        raise WithoutCounterpart("steps between two are a number of steps: set saver.freq_steps")
    return batches(value, old)


def evaluate(value: Any, old: Old) -> Any:
    """Make a frequency and the split that is evaluated."""
    if value in ("no", None, False):
        return NOTHING
    new: Tree = {"valid_dataset.split": Because(old["dataset_test_split"], "dataset_test_split")}
    if value == "epoch":
        return new | {"evaluator.freq_epochs": 1}
    key = next((one for one in ("eval_steps", "logging_steps") if old[one]), None)
    steps = old[key] if key else 10
    if steps < 1:
        raise WithoutCounterpart(f"{key} below 1 is a share of all steps: set evaluator.freq_steps")
    told = f"{key}: {steps}" if key else f"as often as TRL logs by default, every {steps} steps"
    return new | {"evaluator.freq_steps": Because(batches(steps, old), told)}


def only_config(value: Any, _old: Old) -> Any:
    """Take the one configuration of a list."""
    if isinstance(value, list) and len(value) > 1:
        raise MustDecide("one configuration is read: further ones are sources of train_dataset.mixed_with")
    return value[0] if isinstance(value, list) and value else NOTHING


def epochs(value: Any, old: Old) -> Any:
    """Make whole epochs."""
    if old["max_steps"] is not None and old["max_steps"] > 0:
        return Because(at_least_one(value), "max_steps ends the run") if value > 1000 else at_least_one(value)
    return at_least_one(value) if value == int(value) else Because(at_least_one(value), f"whole epochs: {value}")


def of_answers(value: Any, _old: Old) -> Any:
    """Refuse a loss over prompts."""
    if value is False:
        raise WithoutCounterpart("the loss is over answers only, not over prompts")
    return NOTHING


def clipping(value: Any, _old: Old) -> Any:
    """Keep the bound; clipping can't be switched off."""
    if not value:
        raise WithoutCounterpart("gradients are always clipped: set a large gradient_clipping")
    return value


def per_epoch(value: Any, _old: Old) -> Any:
    """Save once per epoch if that is the strategy."""
    return {"saver.freq_epochs": 1} if value == "epoch" else NOTHING


def resume(value: Any, _old: Old) -> Any:
    """Write checkpoints from which a run resumes."""
    return {"recover.mode": "auto", "recover.freq_secs": 600} if value else NOTHING


_LOSSES: dict[str, Tree] = {
    "dapo": {"actor.aggregation": "token_mean"},
    "bnpo": {"actor.aggregation": Because("token_mean", "tokens of the whole batch weigh equally, not of a device's")},
    "grpo": {"actor.aggregation": "sequence_mean"},
    "dr_grpo": {"actor.aggregation": "constant"},
    "sapo": {"actor.objective": "sapo", "actor.aggregation": "sequence_mean"},
    "cispo": {"actor.objective": "cispo", "actor.aggregation": "token_mean"},
}


def loss(value: Any, _old: Old) -> Tree:
    """Choose objective and aggregation."""
    if value not in _LOSSES:
        raise MustDecide(f"losses are those of TRL's {', '.join(_LOSSES)}, and others: docs/algorithms.md")
    return _LOSSES[value]


def if_clips(value: Any, old: Old) -> Any:
    """Keep a bound if the loss clips ratios."""
    clips = old["loss_type"] in ("dapo", "bnpo", "grpo", "dr_grpo")
    return value if clips and value is not None else NOTHING


def if_sapo(value: Any, old: Old) -> Any:
    """Keep a setting of the loss SAPO."""
    return value if old["loss_type"] == "sapo" else NOTHING


def upper(value: Any, old: Old) -> Any:
    """Give epsilon_high the place that it has in the loss."""
    if old["loss_type"] == "cispo":
        return {"actor.cispo_max": old["epsilon"] if value is None else value}
    return if_clips(value, old)


def level(value: Any, old: Old) -> Any:
    """Choose the level of ratios."""
    if value != "sequence":
        return NOTHING
    if old["loss_type"] != "grpo":
        raise MustDecide("one ratio per completion goes with the mean over completions: loss_type grpo")
    return value


def correction(value: Any, old: Old) -> Tree:
    """TRL corrects for vLLM's numerics; where it samples by itself there is nothing to correct for."""
    is_one_step = updates(old) == 1
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


def kl(value: Any, _old: Old) -> Any:
    """Make a penalty in the loss, and the reference that it needs."""
    if not value:
        return NOTHING
    told = "in the loss, as TRL's; the reference is the model before training"
    return {"actor.kl_ctl": value, "actor.kl_in": Because("loss", told), "actor.kl_estimator": "k3", "ref": {}}


def allocation(value: Any, old: Old) -> Tree:
    """Share devices out to servers and trainer."""
    if old["use_cpu"]:
        return rules.on_devices(Because("lite.d1+d1", "a CPU, whose server is the embedded one"), 0)
    size = old["vllm_tensor_parallel_size"]
    if value and old["vllm_mode"] == "server":
        told = "vLLM has devices of its own, as `trl vllm-serve` had; the launcher starts it"
        return rules.on_devices(Because(f"vllm.d1p1t{size}+d{old.devices}p1t1", told), old.devices + size)
    return rules.on_devices(rules.beside("vllm", old.devices, tensor=size), old.devices)


def allocation_of_sft(value: Any, old: Old) -> Tree:
    """Give the trainer all devices."""
    return rules.on_devices(f"d{old.devices}", 0 if value else old.devices)


def length(value: Any, old: Old) -> Tree:
    """Bound completions, and let the embedded server hold them."""
    new: Tree = {"gconfig.max_new_tokens": value}
    is_embedded = old["use_cpu"] or (old.devices == 1 and not (old["use_vllm"] and old["vllm_mode"] == "server"))
    if is_embedded and value is not None and value >= 1536:
        new["lite.context"] = Because(value + 2048, "prompt and completion in the embedded server")
    return new


def rewards(value: Any, old: Old) -> Any:
    """Leave the reward to be filled in: TRL's functions get lists."""
    told = "one completion at a time here, not lists: (prompt, completions, prompt_ids, completion_ids, **columns)"
    names = [value] if isinstance(value, str) else list(value or [])
    weights = old["reward_weights"] or [1.0] * len(names)
    if len(names) > 1 and len(weights) == len(names):
        return Because(MISSING, f"{told}, with weights: {dict(zip(names, weights, strict=True))}")
    return Because(MISSING, f"FILE.py:FUNCTION; {told}")
