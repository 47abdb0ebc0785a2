"""Contradictions between config keys, grouped by the blocks that they compare; experiments call their groups."""

import logging

from arealite.api.alloc_mode import AllocationMode, ParallelSizes
from arealite.api.config.data import LOGGER_MODES, DatasetConfig, EvaluatorConfig, RecoverConfig, StatsLoggerConfig
from arealite.api.config.launcher import ClusterSpecConfig, WorkersConfig
from arealite.api.config.model import FrozenActorConfig, OptimizerConfig, PPOActorConfig, TrainEngineConfig
from arealite.api.config.rollout import GenerationHyperparameters, InferenceEngineConfig, LiteConfig
from arealite.api.errors import require
from arealite.api.servers import KINDS, kinds_where

logger = logging.getLogger("arealite.config")


def check_loggers(loggers: StatsLoggerConfig) -> None:
    """Refuse unknown modes of loggers, which would fail only after models and servers have loaded."""
    for service, modes in LOGGER_MODES.items():
        mode = getattr(loggers, service).get("mode", "disabled")
        require(
            mode in modes, f"stats_logger.{service}.mode must be one of {', '.join(modes)}: got {mode}. Correct it."
        )


def check_schedule(recover: RecoverConfig, evaluator: EvaluatorConfig, valid: DatasetConfig | None) -> None:
    """Require a trigger for checkpoints and data for evaluations."""
    require(
        recover.mode == "disabled" or any((recover.freq_epochs, recover.freq_steps, recover.freq_secs)),
        f"recover must have a trigger with recover.mode={recover.mode}: got none. Set e.g. recover.freq_secs=600.",
    )
    require(
        valid is not None or not any((evaluator.freq_epochs, evaluator.freq_steps, evaluator.freq_secs)),
        "valid_dataset must be given if evaluator has a frequency: got null. "
        "Add a valid_dataset block, or set evaluator.freq_steps=null (and freq_epochs, freq_secs).",
    )


def check_mixture(train: DatasetConfig, valid: DatasetConfig | None) -> None:
    """Require a weight for all sources of a mixture or for none, and a single source elsewhere."""
    weights = [train.weight, *(source.weight for source in train.mixed_with)]
    require(
        (None in weights) == (set(weights) == {None}),
        f"weight must be given in train_dataset and all its mixed_with, or nowhere: got {weights}. Add the others.",
    )
    require(
        train.shuffle or train.weight is None,
        "train_dataset.shuffle must be true if sources have weights: got false. Set it, or remove the weights.",
    )
    require(
        not (train.mixed_with and train.image_key),
        f"train_dataset.mixed_with must be empty with image_key: got image_key {train.image_key}. Use one source.",
    )
    require(
        valid is None or not (valid.mixed_with or valid.weight),
        "valid_dataset must be one source: got mixed_with or weight. Remove them, and name one in valid_dataset.path.",
    )


def check_backend(mode: AllocationMode, text: str, rollout: InferenceEngineConfig) -> None:
    """Refuse another kind of servers than that of the allocation (`text`)."""
    require(
        rollout.backend in (InferenceEngineConfig().backend, mode.gen_backend),  # the default was not given
        f"rollout.backend must agree with allocation_mode: got {rollout.backend} and {text}. Remove rollout.backend.",
    )


def check_allocation(
    mode: AllocationMode | None, text: str, cluster: ClusterSpecConfig, rollout: InferenceEngineConfig | None
) -> None:
    """Require devices for the allocation (`text`), and a transfer of weights that its servers support."""
    if mode is None:
        return
    if rollout is not None and mode.gen_backend is not None:
        require(
            rollout.weight_update == "disk" or mode.gen_pp_size == 1,
            f"rollout.weight_update must be disk if servers have p > 1: got broadcast and {text}. "
            "Set rollout.weight_update=disk or p1.",
        )
    servers_are_ours = rollout is None or not rollout.server_addrs
    needed = mode.num_devices if servers_are_ours else mode.train_world_size
    require(
        cluster.n_gpus_per_node == 0 or needed <= cluster.n_nodes * cluster.n_gpus_per_node,
        f"allocation_mode must fit the cluster: got {text}, which needs {needed} GPUs, and "
        f"{cluster.n_nodes} x {cluster.n_gpus_per_node} GPUs. Change it, or cluster.n_nodes or "
        "cluster.n_gpus_per_node (0 is a CPU cluster).",
    )


def check_colocated(
    mode: AllocationMode | None, rollout: InferenceEngineConfig | None, workers: WorkersConfig | None
) -> None:
    """Servers on the trainer's devices are ours, beside ranks of a script. One in its process samples from its
    parameters; others give their memory back, for which nothing may run, and read weights from disk."""
    if rollout is None or mode is None or not (mode.is_colocated or mode.takes_turns):
        return
    wrong_way = "broadcast" if mode.takes_turns else "disk"
    why = "as NCCL refuses two ranks on one GPU" if mode.takes_turns else "whose server has the weights already"
    is_running = mode.takes_turns and rollout.pause_mode != "abort"
    senders = rollout.weight_update_senders if mode.takes_turns else None
    for key, is_wrong, got, reason in (
        ("rollout.server_addrs", bool(rollout.server_addrs), ", ".join(rollout.server_addrs), "whose servers are ours"),
        ("rollout.weight_update", rollout.weight_update == wrong_way, wrong_way, why),
        ("rollout.weight_update_senders", senders is not None, senders, why),
        ("rollout.pause_mode", is_running, rollout.pause_mode, "whose servers sleep when nothing runs"),
        ("workers", workers is not None, "a block", "whose trainer is ranks of a script"),
    ):
        change = "Remove it, or write '+' in allocation_mode."
        require(not is_wrong, f"{key} must be left out with allocation_mode={mode}, {reason}: got {got}. {change}")


def check_senders(rollout: InferenceEngineConfig | None, num_ranks: int | None) -> None:
    """Require no more senders than the trainer has ranks, and none without a broadcast."""
    if rollout is None or (senders := rollout.weight_update_senders) is None:
        return
    require(
        rollout.weight_update != "disk",
        f"rollout.weight_update_senders must be left out with rollout.weight_update=disk: got {senders}. Remove it.",
    )
    require(
        num_ranks is None or senders <= num_ranks,
        f"rollout.weight_update_senders must be at most the trainer's ranks: got {senders} of {num_ranks}. Lower it.",
    )


def check_training(engine: TrainEngineConfig, key: str, dataset: DatasetConfig, expected_type: str) -> None:
    """Require an optimizer for a trained model, and rows of the type that its experiment needs."""
    require(
        engine.optimizer is not None,
        f"{key}.optimizer must be a block: got null. Remove it for the default, or set its lr.",
    )
    require(
        dataset.type == expected_type,
        f"train_dataset.type must be {expected_type} in this experiment: got {dataset.type}. Remove it or correct it.",
    )
    if engine.lora is not None:
        require(
            engine.lora.dropout == 0 or not engine.disable_dropout,
            f"{key}.lora.dropout must be 0 where {key}.disable_dropout is true: got {engine.lora.dropout}. Remove it.",
        )


def check_engine(engine: TrainEngineConfig, key: str, cluster: ClusterSpecConfig, sizes: ParallelSizes | None) -> None:
    """Refuse options of memory and speed without an effect; `sizes` of the ranks are None while unknown."""
    require(
        engine.gradient_checkpointing or not engine.activation_offloading,
        f"{key}.activation_offloading must be false without {key}.gradient_checkpointing: got true. Only inputs of "
        "recomputed layers are moved; set gradient_checkpointing=true.",
    )
    require(
        cluster.n_gpus_per_node > 0 or not engine.activation_offloading,
        f"{key}.activation_offloading must be false on CPUs: got true and cluster.n_gpus_per_node=0. Remove it.",
    )
    copies = engine.fsdp.dp_replicate
    require(
        sizes is None or sizes.data % copies == 0,
        f"{key}.fsdp.dp_replicate must divide d of the trainer: got {copies} and {sizes}. Set it to the number of "
        "nodes, or to 1.",
    )
    optimizer = engine.optimizer or OptimizerConfig()
    require(
        optimizer.type != "adam_bf16" or max(optimizer.beta1, optimizer.beta2) <= 0.99,
        f"{key}.optimizer.beta1 and beta2 must be at most 0.99 with type adam_bf16: got {optimizer.beta1} and "
        f"{optimizer.beta2}. What a step adds to a moment would be lost in rounding. Lower them, or use type adam.",
    )


def check_parallel(engine: TrainEngineConfig, key: str, sizes: ParallelSizes, *, given_by: str) -> None:
    """Refuse options that ranks of these sizes don't have, whatever the model."""
    for letter, size, option, is_on in (
        ("t", sizes.tensor, "lora", engine.lora is not None),
        ("p", sizes.pipeline, "lora", engine.lora is not None),
        ("t", sizes.tensor, "torch_compile", engine.torch_compile),  # inductor fails on transformers' parallel layers
    ):
        require(
            not is_on or size == 1,
            f"{letter} of the trainer must be 1 with {key}.{option}: got {sizes}. Write {letter}1 and "
            f"d{sizes.data * size} in {given_by}, or remove {key}.{option}.",
        )


def check_workers(workers: object) -> None:
    """Require worker groups for a script with a master."""
    require(workers is not None, "workers must be given to a script of a master: got nothing. Add `workers: {}`.")


def check_servers(rollout: InferenceEngineConfig, lite: LiteConfig, **samplers: GenerationHyperparameters) -> None:
    """The chosen servers must do what is asked of them, by blocks of these keys, and as other servers would do it."""
    backend, limits = rollout.backend, KINDS[rollout.backend]
    modes = limits.pause_modes
    require(
        rollout.pause_mode in modes,
        f"rollout.pause_mode must be {' or '.join(modes)} for {backend}: got {rollout.pause_mode}. Remove it.",
    )
    for key, sampler in samplers.items():
        check_sampler(sampler, key, backend)
    longest = max(sampler.max_new_tokens for sampler in samplers.values())
    require(
        not limits.is_embedded or bool(rollout.server_addrs) or longest < lite.context,
        f"lite.context must be greater than max_new_tokens: got {lite.context} and {longest}. "
        "Raise lite.context or lower gconfig.max_new_tokens.",
    )


def check_sampler(gconfig: GenerationHyperparameters, key: str, backend: str) -> None:
    """The block `key` must be possible, and possible for the servers."""
    limits, temperature = KINDS[backend], gconfig.temperature
    require(
        gconfig.min_new_tokens <= gconfig.max_new_tokens,
        f"{key}.min_new_tokens must be at most {key}.max_new_tokens: got {gconfig.min_new_tokens} and "
        f"{gconfig.max_new_tokens}. Lower the first or raise the second.",
    )
    require(
        temperature <= limits.max_temperature,
        f"{key}.temperature must be at most {limits.max_temperature:g} for {backend}: got {temperature:g}. "
        f"Lower it, or use {kinds_where(lambda kind: kind.max_temperature >= temperature)}.",
    )
    require(
        limits.delays_stop_strings or not (gconfig.stop and gconfig.min_new_tokens > 0),
        f"{key}.min_new_tokens must be 0 with {key}.stop for {backend}: got {gconfig.min_new_tokens} and "
        f"{gconfig.stop}. It looks for stop strings from the first token on. Remove one, or use "
        f"{kinds_where(lambda kind: kind.delays_stop_strings)}.",
    )


def check_sampling(
    gconfig: GenerationHyperparameters, rollout: InferenceEngineConfig, cluster: ClusterSpecConfig
) -> None:
    """Samples must be ones that can be trained on, so servers must say what top_p, top_k and min_p have kept."""
    require(
        not gconfig.greedy or gconfig.n_samples == 1,
        f"gconfig.greedy must be false if gconfig.n_samples > 1: got true and {gconfig.n_samples}. Samples were equal.",
    )
    require(
        gconfig.min_new_tokens == 0,
        f"gconfig.min_new_tokens must be 0 in training: got {gconfig.min_new_tokens}. Until then servers sample "
        "without stop tokens, which the trainer's logprobs include. eval_gconfig may have another.",
    )
    backend, limits = rollout.backend, KINDS[rollout.backend]
    require(
        not gconfig.narrows or gconfig.top_k > 1,
        "gconfig.top_k must be at least 2 in training: got 1, which leaves the policy no choice. Remove it.",
    )
    require(
        not gconfig.narrows or gconfig.top_k <= limits.max_kept_ids,
        f"gconfig.top_k must be at most {limits.max_kept_ids:g} for {backend} in training: got {gconfig.top_k}.",
    )
    require(
        not gconfig.narrows or limits.returns_kept_on_cpu or cluster.n_gpus_per_node > 0 or bool(rollout.server_addrs),
        f"gconfig.top_p must be 1 and gconfig.top_k and min_p left out for {backend} on CPUs: got {gconfig.top_p:g}, "
        f"{gconfig.top_k} and {gconfig.min_p:g}. It returns what it sampled from only on GPUs (its Model Runner V2); "
        f"else ratios are wrong. Remove them, or use {kinds_where(lambda kind: kind.returns_kept_on_cpu)}.",
    )


def check_objective(actor: PPOActorConfig, gconfig: GenerationHyperparameters, rollout: InferenceEngineConfig) -> None:
    """Require what the resolved choices need, and keys that agree with the sampling."""
    check_equal("actor.group_size", actor.group_size, "gconfig.n_samples", gconfig.n_samples)
    check_equal("actor.temperature", actor.temperature, "gconfig.temperature", gconfig.temperature)
    if actor.max_new_tokens is not None:
        check_equal("actor.max_new_tokens", actor.max_new_tokens, "gconfig.max_new_tokens", gconfig.max_new_tokens)
    if not actor.disable_dropout:
        logger.warning("actor.disable_dropout=false has no effect: dropout would make the ratios of policies noise.")
    for name, needs_group, off in (
        ("baseline", actor.baseline in ("group_mean", "leave_one_out", "length_weighted"), "none"),
        ("reward_scale", actor.reward_scale in ("group_std", "group_mean"), "none"),
        ("group_adv_norm", actor.group_adv_norm, "false"),
        ("dynamic_sampling", actor.dynamic_sampling, "false"),
    ):
        require(
            not needs_group or gconfig.n_samples > 1,
            f"actor.{name} must be {off} if gconfig.n_samples is 1: got {getattr(actor, name)}. "
            f"A group of one has no spread; raise gconfig.n_samples or set actor.{name}={off}.",
        )
    require(
        actor.ppo_n_minibatches <= rollout.consumer_batch_size,
        f"actor.ppo_n_minibatches must be at most rollout.consumer_batch_size: got {actor.ppo_n_minibatches} "
        f"and {rollout.consumer_batch_size}. Lower the first or raise train_dataset.batch_size.",
    )


def check_critic(actor: PPOActorConfig, *, has_critic: bool) -> None:
    """Require a critic exactly with the baseline that uses it."""
    got = f"got {actor.baseline} with actor.algorithm {actor.algorithm or 'null'}"
    require(
        has_critic or actor.baseline != "critic",
        f"actor.baseline must not be critic without a critic: {got}. Choose others, or use PPOConfig, as "
        "examples/arealite/gsm8k_ppo.py does.",
    )
    require(
        not has_critic or actor.baseline == "critic",
        f"actor.baseline must be critic with a critic block: {got}. Remove both, or use GRPOConfig, as "
        "examples/arealite/gsm8k_grpo.py does.",
    )


def check_reference(actor: PPOActorConfig, ref: FrozenActorConfig | None, gconfig: GenerationHyperparameters) -> None:
    """Require a reference for a KL penalty; it is never trained."""
    if ref is None:
        require(
            actor.kl_ctl == 0,
            f"actor.kl_ctl must be 0 without a ref block: got {actor.kl_ctl}. "
            "Add e.g. `ref: {path: ${actor.path}}` or set actor.kl_ctl=0.",
        )
        return
    if actor.kl_ctl == 0:
        logger.warning("ref has no effect: actor.kl_ctl is 0. Set actor.kl_ctl above 0 or remove the ref block.")
    check_equal("ref.temperature", ref.temperature, "gconfig.temperature", gconfig.temperature)
    check_frozen(ref, "ref")


def check_teacher(actor: PPOActorConfig, teacher: FrozenActorConfig | None, gconfig: GenerationHyperparameters) -> None:
    """Require a teacher block exactly for distillation."""
    require(
        (teacher is not None) == (actor.baseline == "teacher"),
        f"actor.baseline must be teacher exactly with a teacher block: got {actor.baseline} and "
        f"{'no block' if teacher is None else 'a block'}. Set actor.algorithm=opd and teacher.path, as "
        "examples/arealite/distill.py does, or remove both.",
    )
    if teacher is not None:
        check_equal("teacher.temperature", teacher.temperature, "gconfig.temperature", gconfig.temperature)
        check_frozen(teacher, "teacher")


def check_frozen(engine: TrainEngineConfig, key: str) -> None:
    """Refuse keys of training in the block of a reference or teacher."""
    require(
        engine.optimizer is None, f"{key}.optimizer must be null: got an optimizer. It is never trained; remove it."
    )
    unused = [*engine.learning_keys(), *([] if engine.lora is None else ["lora"])]
    require(
        not unused,
        f"{key} must have no keys of learning: got {', '.join(unused)}. It is never trained; remove them, or give "
        "them to the policy.",
    )


def check_equal(key: str, value: float, other: str, expected: float) -> None:
    """Require a key that follows another to have the same value."""
    require(
        value == expected, f"{key} must equal {other}: got {value} and {expected}. Remove {key}; it follows {other}."
    )
