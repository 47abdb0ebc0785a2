"""How values of verl's keys become ours: minibatches, estimators of advantages, penalties, frequencies."""

from typing import Any

from arealite.api.config.schema import MISSING
from arealite.migrate.rules import (
    NOTHING,
    Because,
    MustDecide,
    Old,
    Tree,
    WithoutCounterpart,
    beside,
    or_missing,
)

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "model", "rollout"))
OPTIM, FSDP = f"{ACTOR}.optim", f"{ACTOR}.fsdp_config"
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


def estimator(value: Any, old: Old) -> Tree:
    """Choose baseline, scale and whitening."""
    if value not in _ESTIMATORS:
        raise MustDecide(_NO_OTHER)
    new = dict(_ESTIMATORS[value])
    if value == "grpo":
        is_scaled = old["algorithm.norm_adv_by_std_in_grpo"]
        new["actor.reward_scale"] = Because("group_std" if is_scaled else "none", "norm_adv_by_std_in_grpo")
    if value == "gae":
        new["actor.gae_lambda"] = Because(old["algorithm.lam"], "algorithm.lam")
    return new


def minibatches(value: Any, old: Old) -> Because:
    """Count minibatches where verl gives their size."""
    batch, epochs = old["data.train_batch_size"], old[f"{ACTOR}.ppo_epochs"]
    told = f"{batch} prompts / {value}: verl gives the size of a minibatch, this is their number"
    return Because(max(1, batch // value), told if epochs == 1 else f"{told}; {epochs} epochs over a batch become one")


def _is_gspo_or_gmpo(old: Old) -> bool:
    return old[f"{ACTOR}.policy_loss.loss_mode"] in ("gspo", "geo_mean")


def aggregation(value: Any, old: Old) -> Any:
    """Choose what weighs equally in the loss."""
    if value not in _AGGREGATIONS:
        raise MustDecide("aggregations are in docs/algorithms.md")
    if _is_gspo_or_gmpo(old):  # which the loss decides
        return NOTHING
    new = dict(_AGGREGATIONS[value])
    if value == "seq-mean-token-sum-norm" and old[f"{ACTOR}.loss_scale_factor"] is not None:
        new["actor.loss_constant"] = Because(float(old[f"{ACTOR}.loss_scale_factor"]), "loss_scale_factor")
    return new


def loss(value: Any, old: Old) -> Any:
    """Choose the objective."""
    if value not in _LOSSES:
        raise MustDecide("losses are in docs/algorithms.md")
    new = dict(_LOSSES[value])
    if value == "cispo":
        new["actor.cispo_max"] = Because(1 + old[f"{ACTOR}.clip_ratio_high"], "1 + clip_ratio_high")
    if value == "sapo":
        taus = {"positive": "tau_pos", "negative": "tau_neg"}
        new |= {f"actor.sapo_tau_{sign}": Because(old[f"{ACTOR}.{key}"], key) for sign, key in taus.items()}
    return new or NOTHING


def _clips(old: Old) -> bool:
    return old[f"{ACTOR}.policy_loss.loss_mode"] in ("vanilla", "gspo")


def clip(value: Any, old: Old) -> Any:
    """Take clip_ratio where the lower bound is not given."""
    if not _clips(old) or f"{ACTOR}.clip_ratio_low" in old:
        return NOTHING
    told = "verl itself takes clip_ratio_low and clip_ratio_high, which stay 0.2 unless they are given, too"
    return {"actor.eps_clip": Because(value, told)}


def if_clips(ours: str) -> Any:
    """Keep a value where the loss clips ratios."""
    return lambda value, old: {ours: value} if _clips(old) else NOTHING


def higher(value: Any, old: Old) -> Any:
    """Keep an upper bound that is not the lower one."""
    lower = old[f"{ACTOR}.clip_ratio_low"] if f"{ACTOR}.clip_ratio_low" in old else old[f"{ACTOR}.clip_ratio"]
    return {"actor.eps_clip_higher": value} if _clips(old) and value != lower else NOTHING


def kl_in_loss(value: Any, old: Old) -> Any:
    """Make a penalty in the loss, and the reference that it needs."""
    if not value:
        return NOTHING
    if old["algorithm.use_kl_in_reward"]:
        raise MustDecide("the KL penalty is in the rewards or in the loss: algorithm.use_kl_in_reward is true")
    kind = old[f"{ACTOR}.kl_loss_type"]
    if kind not in _KL:
        told = f"kl_loss_type {kind} has an expected gradient of 0 near the reference; k3 does not"
    else:
        told = f"kl_loss_type {kind}"
    return {
        "actor.kl_ctl": Because(old[f"{ACTOR}.kl_loss_coef"], "kl_loss_coef"),
        "actor.kl_in": "loss",
        "actor.kl_estimator": Because(_KL.get(kind, "k3"), told),
        "ref": {},
    }


def kl_in_reward(value: Any, old: Old) -> Any:
    """Make a penalty in the rewards, and the reference that it needs."""
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


def proximal(value: Any, old: Old) -> Tree:
    """verl computes the logprobs of the policy before the update anew unless told to take the server's."""
    if value:
        return {"actor.proximal": Because("rollout", "bypass_mode: the server's logprobs")}
    size = old[f"{ACTOR}.ppo_mini_batch_size"]
    is_one_step = old["data.train_batch_size"] <= size and old[f"{ACTOR}.ppo_epochs"] == 1
    told = "the policy before the update" + (", exact with one optimizer step" if is_one_step else "")
    return {"actor.proximal": Because("current" if is_one_step else "recompute", told)}


def correction(value: Any, old: Old) -> Any:
    """Truncate weights as rollout_is does."""
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


def micro_batch(value: Any, old: Old) -> Any:
    """Count tokens where verl counts sequences per GPU."""
    if value is None or old[f"{ACTOR}.use_dynamic_bsz"]:
        return NOTHING
    longest = old["data.max_prompt_length"] + old["data.max_response_length"]
    return {"actor.mb_spec.max_tokens_per_mb": Because(value * longest, f"{value} sequences of {longest} tokens")}


def tokens(value: Any, old: Old) -> Any:
    """Bound a micro-batch where verl does so by tokens."""
    return {"actor.mb_spec.max_tokens_per_mb": value} if old[f"{ACTOR}.use_dynamic_bsz"] else NOTHING


def files(value: Any, _old: Old) -> Any:
    """Mix several files."""
    files = value if isinstance(value, list) else [value]
    new: Tree = {"train_dataset.path": or_missing(files[0], _old)}
    if len(files) > 1:
        new["train_dataset.mixed_with"] = [{"path": one} for one in files[1:]]
    return new


def valid(value: Any, _old: Old) -> Any:
    """Take the first file."""
    files = value if isinstance(value, list) else [value]
    if len(files) > 1:
        return {
            "valid_dataset.path": Because(files[0], f"one source is evaluated; not {', '.join(map(str, files[1:]))}")
        }
    return {"valid_dataset.path": files[0]} if value else NOTHING


def reward(value: Any, old: Old) -> Any:
    """Name file and function."""
    told = "arguments change to (prompt, completions, prompt_ids, completion_ids, answer, **columns)"
    name = old["custom_reward_function.name"] or old["reward.custom_reward_function.name"]
    if value:
        return {"reward": Because(f"{value}:{name}", told)}
    if old["reward.custom_reward_function.path"]:
        return NOTHING
    return {"reward": Because(MISSING, f"FILE.py:FUNCTION; verl chooses one by data_source; {told}")}


def or_reward(value: Any, old: Old) -> Any:
    """Name file and function by the newer keys."""
    return NOTHING if not value or old["custom_reward_function.path"] else reward(value, old)


def allocation(value: Any, old: Old) -> Tree:
    """Share the GPUs out to servers and trainer."""
    nodes, gpus = old["trainer.nnodes"], old["trainer.n_gpus_per_node"]
    servers = value if value in ("sglang", "vllm") else "sglang"
    mode = beside(servers, nodes * gpus, tensor=old[f"{ROLLOUT}.tensor_model_parallel_size"])
    longest = old["data.max_prompt_length"] + old["data.max_response_length"]
    alone = {"lite.context": Because(longest, "the longest prompt and completion")} if nodes * gpus == 1 else {}
    return {"allocation_mode": mode, **alone}


def greater(ours: str) -> Any:
    """Make a frequency, or nothing of -1."""
    return lambda value, _: {ours: value} if isinstance(value, int) and value > 0 else NOTHING


def evaluations(value: Any, _old: Old) -> Any:
    """Make a frequency, or nothing of -1."""
    return {"evaluator.freq_steps": value} if value and value > 0 else NOTHING


def checkpoints(value: Any, old: Old) -> Any:
    """Save, and write checkpoints to resume from, if verl resumes."""
    if not value or value <= 0:
        return NOTHING
    new: Tree = {"saver.freq_steps": value}
    mode = {"auto": "auto", "resume_path": "resume"}.get(old["trainer.resume_mode"])
    return new | ({"recover.mode": Because(mode, "trainer.resume_mode"), "recover.freq_steps": value} if mode else {})


def warmup(value: Any, old: Old) -> Any:
    """Make a share of all steps of a number of steps."""
    if value is None or value < 0:
        return NOTHING
    key, total = "actor.optimizer.warmup_steps_proportion", old["trainer.total_training_steps"]
    if value and not total:
        return {key: Because(MISSING, f"{value} steps, as a share of all")}
    return {key: Because(value / total if value else 0.0, f"{value} of {total} steps")}


def lora(value: Any, old: Old) -> Any:
    """Make a block of LoRA of a rank above 0."""
    if not value:
        return NOTHING
    return {
        "actor.lora.rank": value,
        "actor.lora.alpha": Because(old[f"{MODEL}.lora_alpha"], "lora_alpha"),
        "actor.lora.target_modules": Because(old[f"{MODEL}.target_modules"], "target_modules"),
    }


def offload(value: Any, _old: Old) -> Any:
    """Offload parameters."""
    return {"actor.fsdp.offload_params": Because(True, "with the optimizer's state")} if value else NOTHING


def shards(value: Any, old: Old) -> Any:
    """Refuse a size of shards."""
    if value is None or value <= 0:
        return NOTHING
    raise WithoutCounterpart("actor.fsdp.dp_replicate is the number of copies: the trainer's ranks / fsdp_size")
