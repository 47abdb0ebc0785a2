"""Contradictions between config keys: one function per sentence, which takes the blocks it compares and raises.

The `validate()` of each experiment calls those that apply to it.
"""

from __future__ import annotations

import logging

from arealite.api.alloc_mode import AllocationMode
from arealite.api.config.data import DatasetConfig, EvaluatorConfig, RecoverConfig
from arealite.api.config.launcher import ClusterSpecConfig
from arealite.api.config.model import PPOActorConfig, TrainEngineConfig
from arealite.api.config.rollout import ALL_TOKENS, GenerationHyperparameters, InferenceEngineConfig, LiteConfig
from arealite.api.errors import ConfigError
from arealite.api.server_limits import backends_where, limits_of

logger = logging.getLogger("arealite.config")


def warn_same_file(train: DatasetConfig, valid: DatasetConfig | None) -> None:
    """Warn about an evaluation on the training file; a path with splits may be the same."""
    is_file = train.path.endswith((".jsonl", ".json", ".parquet"))
    if valid and valid.path == train.path and is_file:
        logger.warning(
            "valid_dataset.path is the training file %s: evaluations measure training data. "
            "Set valid_dataset.path to another file.",
            train.path,
        )


def check_recover_trigger(recover: RecoverConfig) -> None:
    """Refuse recovery that never writes a checkpoint."""
    if recover.mode != "disabled" and not any((recover.freq_epochs, recover.freq_steps, recover.freq_secs)):
        raise ConfigError(
            f"recover must have a trigger if its mode is {recover.mode}: got none. "
            "Set recover.freq_steps, freq_epochs or freq_secs (e.g. recover.freq_secs=600)."
        )


def check_evaluator_data(evaluator: EvaluatorConfig, valid: DatasetConfig | None) -> None:
    """Refuse evaluations without data."""
    if valid is None and any((evaluator.freq_epochs, evaluator.freq_steps, evaluator.freq_secs)):
        raise ConfigError(
            "valid_dataset must be given if evaluator has a frequency: got null. "
            "Add a valid_dataset block, or set evaluator.freq_steps=null (and freq_epochs, freq_secs)."
        )


def check_devices(
    allocation: AllocationMode | None, text: str, cluster: ClusterSpecConfig, servers_are_ours: bool
) -> None:
    """Refuse an allocation (`text`) that needs more GPUs than the cluster has; servers of others need none of them."""
    if allocation is None or cluster.n_gpus_per_node == 0:
        return
    needed = allocation.train_world_size + (allocation.gen_world_size if servers_are_ours else 0)
    if needed > cluster.n_nodes * cluster.n_gpus_per_node:
        raise ConfigError(
            f"allocation_mode must fit the cluster: got {text}, which needs {needed} GPUs, and "
            f"{cluster.n_nodes} x {cluster.n_gpus_per_node} GPUs. Change it, or cluster.n_nodes or "
            "cluster.n_gpus_per_node (0 is a CPU cluster)."
        )


def check_optimizer(engine: TrainEngineConfig, key: str) -> None:
    """Refuse a trained model without optimizer."""
    if engine.optimizer is None:
        raise ConfigError(f"{key}.optimizer must be a block: got null. Remove it for the default, or set its lr.")


def check_dataset_type(dataset: DatasetConfig, expected: str) -> None:
    """Refuse prompts for fine-tuning and demonstrations for reinforcement learning."""
    if dataset.type != expected:
        raise ConfigError(
            f"train_dataset.type must be {expected} in this experiment: got {dataset.type}. Remove it or correct it."
        )


def check_backend(rollout: InferenceEngineConfig, allocation: AllocationMode, text: str) -> None:
    """Refuse a backend that is not the one of the allocation (`text`)."""
    if rollout.backend not in (InferenceEngineConfig.backend, allocation.gen_backend):  # the default was not given
        raise ConfigError(
            f"rollout.backend must agree with allocation_mode: got {rollout.backend} and {text}. "
            "Remove rollout.backend."
        )


def check_broadcast_pipeline(rollout: InferenceEngineConfig, allocation: AllocationMode, text: str) -> None:
    """Refuse to broadcast weights to servers that are pipelines."""
    if rollout.weight_update == "broadcast" and allocation.gen_pp_size > 1:
        raise ConfigError(
            f"rollout.weight_update must be disk if servers have p > 1: got broadcast and {text}. "
            "Set rollout.weight_update=disk or p1."
        )


def check_servers_sample_as_asked(
    rollout: InferenceEngineConfig,
    lite: LiteConfig,
    gconfig: GenerationHyperparameters,
    eval_gconfig: GenerationHyperparameters,
) -> None:
    """Refuse what the chosen servers can't do, or would do differently from others."""
    check_pause_mode(rollout)
    check_truncated_sampling(rollout, gconfig)
    for key, one in (("gconfig", gconfig), ("eval_gconfig", eval_gconfig)):
        check_token_limits(one, key)
        check_max_temperature(rollout, one, key)
        check_stop_strings(rollout, one, key)
    check_context(rollout, lite, gconfig, eval_gconfig)


def check_token_limits(gconfig: GenerationHyperparameters, key: str) -> None:
    """Refuse a lower limit above the upper one."""
    if gconfig.min_new_tokens > gconfig.max_new_tokens:
        raise ConfigError(
            f"{key}.min_new_tokens must be at most {key}.max_new_tokens: got {gconfig.min_new_tokens} and "
            f"{gconfig.max_new_tokens}. Lower the first or raise the second."
        )


def check_pause_mode(rollout: InferenceEngineConfig) -> None:
    """Refuse a pause mode that the servers do not have."""
    modes = limits_of(rollout.backend).pause_modes
    if rollout.pause_mode not in modes:
        raise ConfigError(
            f"rollout.pause_mode must be {', '.join(modes[:-1])} or {modes[-1]} for {rollout.backend}: got "
            f"{rollout.pause_mode}. Remove it for the default, abort."
        )


def check_truncated_sampling(rollout: InferenceEngineConfig, gconfig: GenerationHyperparameters) -> None:
    """Refuse to sample from a part of the distribution whose logprobs the server does not return."""
    is_narrowed = gconfig.top_p < 1 or gconfig.top_k < ALL_TOKENS
    if is_narrowed and not limits_of(rollout.backend).has_narrowed_logprobs:
        raise ConfigError(
            f"gconfig.top_p must be 1 and gconfig.top_k at least {ALL_TOKENS} for {rollout.backend}: got "
            f"{gconfig.top_p} and {gconfig.top_k}. Its logprobs are those of the whole distribution, not of what it "
            "sampled from, so that importance weights would be wrong. Remove both, or use "
            f"{backends_where(lambda one: one.has_narrowed_logprobs)}."
        )


def check_max_temperature(rollout: InferenceEngineConfig, gconfig: GenerationHyperparameters, key: str) -> None:
    """Refuse a temperature that the server refuses."""
    limit = limits_of(rollout.backend).max_temperature
    if gconfig.temperature > limit:
        raise ConfigError(
            f"{key}.temperature must be at most {limit:g} for {rollout.backend}: got {gconfig.temperature:g}. "
            f"Lower it, or use {backends_where(lambda one: one.max_temperature >= gconfig.temperature)}."
        )


def check_stop_strings(rollout: InferenceEngineConfig, gconfig: GenerationHyperparameters, key: str) -> None:
    """Refuse a least length with stop strings, where the server stops before it."""
    if gconfig.stop and gconfig.min_new_tokens > 0 and not limits_of(rollout.backend).delays_stop_strings:
        raise ConfigError(
            f"{key}.min_new_tokens must be 0 with {key}.stop for {rollout.backend}: got {gconfig.min_new_tokens} and "
            f"{gconfig.stop}. It looks for stop strings from the first token on. Remove one, or use "
            f"{backends_where(lambda one: one.delays_stop_strings)}."
        )


def check_greedy_group(gconfig: GenerationHyperparameters) -> None:
    """Refuse a group of equal samples."""
    if gconfig.greedy and gconfig.n_samples > 1:
        raise ConfigError(
            f"gconfig.greedy must be false if gconfig.n_samples > 1: got true and {gconfig.n_samples}, so "
            "that all samples of a group would be equal. Set gconfig.greedy=false."
        )


def warn_narrowed_sampling(gconfig: GenerationHyperparameters) -> None:
    """Warn about sampling whose logprobs the trainer does not reproduce."""
    if gconfig.top_p < 1 or gconfig.top_k < ALL_TOKENS or gconfig.min_new_tokens > 0:
        logger.warning(
            "gconfig.top_p, top_k and min_new_tokens narrow the distribution that servers sample from, and their "
            "logprobs are of the narrowed one, while the trainer's are of the whole: importance weights are off. "
            "Set top_p to 1, top_k to %d and min_new_tokens to 0 unless you mean it.",
            ALL_TOKENS,
        )


def check_context(rollout: InferenceEngineConfig, lite: LiteConfig, *gconfigs: GenerationHyperparameters) -> None:
    """Refuse completions longer than the embedded server's context."""
    longest = max(gconfig.max_new_tokens for gconfig in gconfigs)
    if limits_of(rollout.backend).is_embedded and not rollout.server_addrs and longest >= lite.context:
        raise ConfigError(
            f"lite.context must be greater than max_new_tokens: got {lite.context} and {longest}. "
            "Raise lite.context or lower gconfig.max_new_tokens."
        )


def check_follows(key: str, value: float, other: str, expected: float) -> None:
    """Refuse a key that must repeat another one and does not."""
    if value != expected:
        raise ConfigError(f"{key} must equal {other}: got {value} and {expected}. Remove {key}; it follows {other}.")


def check_proximal_logprobs(actor: PPOActorConfig) -> None:
    """Refuse the decoupled loss without the logprobs it needs."""
    if actor.use_decoupled_loss and not actor.recompute_logprob:
        raise ConfigError(
            "actor.recompute_logprob must be true if actor.use_decoupled_loss is: got false. "
            "The decoupled loss needs the recomputed logprobs; set actor.recompute_logprob=true."
        )


def warn_unused_cap(actor: PPOActorConfig) -> None:
    """Warn about a cap of weights that the loss does not have."""
    if actor.behav_imp_weight_cap is not None and not actor.use_decoupled_loss:
        logger.warning("actor.behav_imp_weight_cap has no effect: actor.use_decoupled_loss is false.")


def check_group_norm(actor: PPOActorConfig, gconfig: GenerationHyperparameters) -> None:
    """Refuse to normalise within groups of one."""
    for name in ("group_reward_norm", "group_adv_norm"):
        if getattr(actor, name) and gconfig.n_samples == 1:
            raise ConfigError(
                f"actor.{name} must be false if gconfig.n_samples is 1: got true. A group of one has no spread; "
                f"raise gconfig.n_samples or set actor.{name}=false."
            )


def check_minibatches(actor: PPOActorConfig, rollout: InferenceEngineConfig) -> None:
    """Refuse more optimizer steps than episodes."""
    if actor.ppo_n_minibatches > rollout.consumer_batch_size:
        raise ConfigError(
            f"actor.ppo_n_minibatches must be at most rollout.consumer_batch_size: got {actor.ppo_n_minibatches} "
            f"and {rollout.consumer_batch_size}. Lower the first or raise train_dataset.batch_size."
        )


def check_reference_exists(actor: PPOActorConfig, ref: PPOActorConfig | None) -> None:
    """Refuse a penalty without reference."""
    if ref is None and actor.kl_ctl > 0:
        raise ConfigError(
            f"actor.kl_ctl must be 0 without a ref block: got {actor.kl_ctl}. "
            "Add e.g. `ref: {path: ${actor.path}}` or set actor.kl_ctl=0."
        )


def warn_unused_reference(actor: PPOActorConfig, ref: PPOActorConfig | None) -> None:
    """Warn about a reference without penalty."""
    if ref is not None and actor.kl_ctl == 0:
        logger.warning("ref has no effect: actor.kl_ctl is 0. Set actor.kl_ctl above 0 or remove the ref block.")


def check_frozen_reference(ref: PPOActorConfig | None) -> None:
    """Refuse a reference that trains."""
    if ref is not None and ref.optimizer is not None:
        raise ConfigError("ref.optimizer must be null: got an optimizer. A reference is never trained; remove it.")
