"""How values of TRL's keys become ours: completions per device, optimizer steps, losses and corrections."""

from typing import Any

from arealite.api.config.schema import MISSING
from arealite.migrate.rules import (
    NOTHING,
    Because,
    MustDecide,
    Old,
    Tree,
    WithoutCounterpart,
    at_least_one,
    beside,
    split,
)

_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
OPTIMIZERS = dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adam")
OPTIMIZERS |= dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), "adam_8bit")


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


def updates(old: Old) -> int:
    """Return the optimizer steps of a batch."""
    return 1 if "num_generations" not in old.rules else _minibatches(old) * old["num_iterations"]


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
    """Count batches where TRL counts optimizer steps."""
    if value is None or value <= 0:
        return NOTHING
    count = updates(old)
    steps = at_least_one(value / count)
    return steps if count == 1 else Because(steps, f"batches of {count} optimizer steps, which TRL counts")


def warmup(block: str) -> Any:
    """Make a share of all steps of a share, or of a number of steps."""

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


def schedule(block: str) -> Any:
    """Name the shape, and the lowest learning rate of one that has it."""

    def make(value: Any, old: Old) -> Any:
        if value not in _SCHEDULES:
            raise MustDecide("schedules are constant, linear and cosine")
        new: Tree = {f"{block}.optimizer.lr_scheduler_type": _SCHEDULES[value]}
        more = old["lr_scheduler_kwargs"] or {}
        if value == "cosine_with_min_lr" and isinstance(more, dict):
            ratio = more.get("min_lr_rate", more.get("min_lr", 0.0) / old["learning_rate"])
            new[f"{block}.optimizer.min_lr_ratio"] = Because(ratio, "lr_scheduler_kwargs")
        return new

    return make


def dtype(value: Any, old: Old) -> Any:
    """Name the dtype of compute."""
    if old["fp16"]:
        return Because("bfloat16", "float16 needs loss scaling, which is not implemented")
    return "float32" if value is False else "bfloat16"


def lora(block: str) -> Any:
    """Make a block of LoRA of `use_peft` and its keys."""

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


def save(value: Any, old: Old) -> Any:
    """Make a frequency in steps."""
    if value is None or old["save_strategy"] != "steps":
        return NOTHING
    if value < 1:
        raise WithoutCounterpart("steps between two are a number of steps: set saver.freq_steps")
    return {"saver.freq_steps": at_least_one(value / updates(old))}


def evaluate(value: Any, old: Old) -> Any:
    """Make a frequency and the split that is evaluated."""
    if value in ("no", None, False):
        return NOTHING
    new: Tree = {"valid_dataset.split": Because(old["dataset_test_split"], "dataset_test_split")}
    if value == "epoch":
        return new | {"evaluator.freq_epochs": 1}
    steps = old["eval_steps"] or old["logging_steps"]
    if steps < 1:
        raise WithoutCounterpart("eval_steps below 1 is a share of all steps: set evaluator.freq_steps")
    return new | {"evaluator.freq_steps": Because(at_least_one(steps / updates(old)), f"eval_steps: {steps}")}


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


def per_epoch(value: Any) -> Any:
    """Save once per epoch if that is the strategy."""
    return {"saver.freq_epochs": 1} if value == "epoch" else NOTHING


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


def clips(old: Old) -> bool:
    """Tell whether the loss clips ratios."""
    return old["loss_type"] in ("dapo", "bnpo", "grpo", "dr_grpo")


def upper(value: Any, old: Old) -> Any:
    """Give epsilon_high the place that it has in the loss."""
    if old["loss_type"] == "cispo":
        return {"actor.cispo_max": old["epsilon"] if value is None else value}
    return {"actor.eps_clip_higher": value} if clips(old) and value is not None else NOTHING


def level(value: Any, old: Old) -> Any:
    """Choose the level of ratios."""
    if value != "sequence":
        return NOTHING
    if old["loss_type"] != "grpo":
        raise MustDecide("one ratio per completion goes with the mean over completions: loss_type grpo")
    return {"actor.importance_sampling_level": "sequence"}


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
        return {"reward": Because(MISSING, f"{told}, with weights: {dict(zip(names, weights, strict=True))}")}
    return {"reward": Because(MISSING, f"FILE.py:FUNCTION; {told}")}
