"""How values of verl's keys become ours: minibatches, estimators of advantages, penalties, frequencies."""

from typing import Any

from arealite.api.config.types import MISSING
from arealite.migrate import rules
from arealite.migrate.rules import NOTHING, Because, MustDecide, Old, Tree, WithoutCounterpart

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
schedule = rules.one_of("constant", "cosine", otherwise="schedules are constant, linear and cosine")
optimizer = rules.only({"AdamW": NOTHING}, "optimizers are those of actor.optimizer.type")
strategy = rules.only(dict.fromkeys(("fsdp", "fsdp2"), NOTHING), "the trainer is PyTorch's FSDP2")


def estimator(value: Any, old: Old) -> Tree:
    """Choose baseline, scale and whitening."""
    if value not in _ESTIMATORS:
        raise MustDecide("the ways to estimate advantages are in docs/algorithms.md")
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


def aggregation(value: Any, old: Old) -> Any:
    """Choose what weighs equally in the loss."""
    if value not in _AGGREGATIONS:
        raise MustDecide("aggregations are in docs/algorithms.md")
    if old[f"{ACTOR}.policy_loss.loss_mode"] in ("gspo", "geo_mean"):  # they decide it
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


def if_clips(value: Any, old: Old) -> Any:
    """Keep a value where the loss clips ratios."""
    return value if _clips(old) else NOTHING


def clip(value: Any, old: Old) -> Any:
    """Take clip_ratio where the lower bound is not given."""
    if not _clips(old) or f"{ACTOR}.clip_ratio_low" in old:
        return NOTHING
    return Because(
        value, "verl itself takes clip_ratio_low and clip_ratio_high, which stay 0.2 unless they are given, too"
    )


def higher(value: Any, old: Old) -> Any:
    """Keep an upper bound that is not the lower one."""
    lower = old[f"{ACTOR}.clip_ratio_low" if f"{ACTOR}.clip_ratio_low" in old else f"{ACTOR}.clip_ratio"]
    return if_clips(value, old) if value != lower else NOTHING


def kl_in_loss(value: Any, old: Old) -> Any:
    """Make a penalty in the loss, and the reference that it needs."""
    if not value:
        return NOTHING
    if old["algorithm.use_kl_in_reward"]:
        raise MustDecide("the KL penalty is in the rewards or in the loss: algorithm.use_kl_in_reward is true")
    kind = old[f"{ACTOR}.kl_loss_type"]
    told = f"kl_loss_type {kind}"
    if kind not in _KL:
        told += " has an expected gradient of 0 near the reference; k3 does not"
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
    told = "algorithm.kl_ctrl.kl_coef"
    if old["algorithm.kl_ctrl.type"] != "fixed":
        told = "the weight of the penalty is constant: kl_ctrl.type adaptive has no counterpart"
    return {
        "actor.kl_ctl": Because(old["algorithm.kl_ctrl.kl_coef"], told),
        "actor.kl_in": "reward",
        "actor.kl_estimator": Because("k1", "the estimator whose gradient in rewards is that of the divergence"),
        "ref": {},
    }


def proximal(value: Any, old: Old) -> Because:
    """verl computes the logprobs of the policy before the update anew unless told to take the server's."""
    if value:
        return Because("rollout", "bypass_mode: the server's logprobs")
    size = old[f"{ACTOR}.ppo_mini_batch_size"]
    is_one_step = old["data.train_batch_size"] <= size and old[f"{ACTOR}.ppo_epochs"] == 1
    told = "the policy before the update" + (", exact with one optimizer step" if is_one_step else "")
    return Because("current" if is_one_step else "recompute", told)


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


def truncation(value: Any, _old: Old) -> Any:
    """Truncate the weights of tokens where there is a bound."""
    if value is None or value <= 0:
        return NOTHING
    return {
        "actor.correction.action": Because("truncate", "tis_imp_ratio_cap"),
        "actor.correction.level": "token",
        "actor.correction.upper": float(value),
    }


def _longest(old: Old) -> Any:
    return old["data.max_prompt_length"] + old["data.max_response_length"]


def micro_batch(value: Any, old: Old) -> Any:
    """Count tokens where verl counts sequences per GPU."""
    if value is None or old[f"{ACTOR}.use_dynamic_bsz"]:
        return NOTHING
    longest = _longest(old)
    return Because(value * longest, f"{value} sequences of {longest} tokens")


def tokens(value: Any, old: Old) -> Any:
    """Bound a micro-batch where verl does so by tokens."""
    return value if old[f"{ACTOR}.use_dynamic_bsz"] else NOTHING


def files(value: Any, _old: Old) -> Any:
    """Mix several files."""
    files = value if isinstance(value, list) else [value]
    new: Tree = {"train_dataset.path": rules.or_missing(files[0], _old)}
    if len(files) > 1:
        new["train_dataset.mixed_with"] = [{"path": one} for one in files[1:]]
    return new


def valid(value: Any, _old: Old) -> Any:
    """Take the first file."""
    files = value if isinstance(value, list) else [value]
    if not value:
        return NOTHING
    told = f"one source is evaluated; not {', '.join(map(str, files[1:]))}"
    return {"valid_dataset.path": files[0] if len(files) == 1 else Because(files[0], told)}


def answers(value: Any, _old: Old) -> Because:
    """Name the column of what is right."""
    return Because(value, "the column of verl's rows that holds {'ground_truth': ...}; the reward gets it as `answer`")


def reward(value: Any, old: Old) -> Any:
    """Name file and function."""
    told = "arguments change to (prompt, completions, prompt_ids, completion_ids, answer, **columns)"
    name = old["custom_reward_function.name"] or old["reward.custom_reward_function.name"]
    if value:
        return Because(f"{value}:{name}", told)
    if old["reward.custom_reward_function.path"]:
        return NOTHING
    return Because(MISSING, f"FILE.py:FUNCTION; verl chooses one by data_source; {told}")


def or_reward(value: Any, old: Old) -> Any:
    """Name file and function by the newer keys."""
    return NOTHING if not value or old["custom_reward_function.path"] else reward(value, old)


def allocation(value: Any, old: Old) -> Tree:
    """Share the GPUs out to servers and trainer."""
    nodes, gpus = old["trainer.nnodes"], old["trainer.n_gpus_per_node"]
    servers = value if value in ("sglang", "vllm") else "sglang"
    mode = rules.beside(servers, nodes * gpus, tensor=old[f"{ROLLOUT}.tensor_model_parallel_size"])
    alone = {"lite.context": Because(_longest(old), "the longest prompt and completion")} if nodes * gpus == 1 else {}
    return {"allocation_mode": mode, **alone}


def if_critic(value: Any, old: Old) -> Any:
    """Keep a setting of a critic where there is one."""
    return value if old["algorithm.adv_estimator"] == "gae" else NOTHING


def on(value: Any, _old: Old) -> Any:
    """Switch something on."""
    return True if value else NOTHING


def overlong(value: Any, old: Old) -> Any:
    """Keep the length of the buffer if it is used."""
    return value if old["reward_model.overlong_buffer.enable"] else NOTHING


def temperature(value: Any, _old: Old) -> Any:
    """Sample in evaluations unless the temperature is 0."""
    return {"eval_gconfig.greedy": False, "eval_gconfig.temperature": value} if value else NOTHING


def betas(value: Any, _old: Old) -> Tree:
    """Give each its key."""
    return {"actor.optimizer.beta1": value[0], "actor.optimizer.beta2": value[1]}


def if_schedule(value: Any, _old: Old) -> Any:
    """Keep a style of warmup that names a schedule."""
    return value if value in ("constant", "cosine") else NOTHING


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
    return rules.share_of_steps(value, old["trainer.total_training_steps"])


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
    return Because(True, "with the optimizer's state") if value else NOTHING


def shards(value: Any, old: Old) -> Any:
    """Refuse a size of shards."""
    if value is None or value <= 0:
        return NOTHING
    raise WithoutCounterpart("actor.fsdp.dp_replicate is the number of copies: the trainer's ranks / fsdp_size")
