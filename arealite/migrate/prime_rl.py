"""prime-rl's `rl.toml` and `sft.toml`, as of October 2026, with the keys of trainer, orchestrator and inference.

prime-rl counts rollouts per step; we count prompts. Its environments are packages of verifiers, whose place here is a
workflow, or a data set and a reward.
"""

from typing import Any

from arealite.api.config.types import MISSING
from arealite.migrate import rules
from arealite.migrate.rules import NOTHING, Because, MustDecide, Old, Rule, Tree, part_of, patterns, unless

_WHERE_ENVIRONMENTS_GO = "environments of verifiers are a workflow here, or a data set and a reward: docs/workflows.md"


def _warmup(value: Any, old: Old) -> Any:
    return rules.share_of_steps(value, old["max_steps"])


def _min_lr(lr: str) -> Any:
    return lambda value, old: Because(value / old[lr], f"min_lr: {value} / lr")


def _lora(block: str) -> dict[str, Rule]:
    """Return the rules of adapters, which a block switches on."""
    return {
        "model.lora.rank": Rule(f"{block}.lora.rank"),
        "model.lora.alpha": Rule(f"{block}.lora.alpha", make=lambda value, _: rules.at_least_one(value)),
        "model.lora.target_modules": Rule(f"{block}.lora.target_modules"),
        "model.lora.dropout": Rule(
            f"{block}.lora.dropout", make=rules.if_true if block == "model" else lambda *_: NOTHING
        ),
    }


def _model(block: str, optimizer: str) -> dict[str, Rule]:
    """Return the rules of a trainer's tables, named as in sft.toml."""
    return {
        "model.attn": Rule(f"{block}.attn_impl", make=lambda value, _: value if value in _ATTENTIONS else NOTHING),
        "model.compile": Rule(f"{block}.torch_compile", make=lambda value, _: value is not None),
        "model.ac": Rule(f"{block}.gradient_checkpointing", None, lambda value, _: value not in (None, False)),
        "model.ac_offloading": Rule(
            f"{block}.activation_offloading",
            make=lambda _, __: {f"{block}.activation_offloading": True, f"{block}.gradient_checkpointing": True},
        ),
        "model.fsdp_cpu_offload": Rule(f"{block}.fsdp.offload_params", False),
        "model.optim_cpu_offload": unless(False, "fsdp.offload_params offloads parameters and optimizer together"),
        "model.dp_replicate": Rule(f"{block}.fsdp.dp_replicate", 1),
        "model.reduce_dtype": Rule(f"{block}.grad_reduce_dtype", "float32"),
        "model.optimization_dtype": unless("float32", "parameters are float32"),
        "model.cp": unless(1, "sequences are not split over devices"),
        "model.ep": unless(1, "experts are not split over devices"),
        "model.fp8": unless(False, "training is in bfloat16 or float32"),
        "model.trust_remote_code": unless(False, "code of models is not run"),
        **_lora(block),
        "optim.type": Rule(f"{block}.optimizer.type", make=rules.only({"adamw": "adam"}, "the optimizer is AdamW")),
        "optim.lr": Rule(f"{optimizer}.lr", 1e-06),
        "optim.weight_decay": Rule(f"{optimizer}.weight_decay", 0.01),
        "optim.betas1": Rule(f"{optimizer}.beta1", 0.9),
        "optim.betas2": Rule(f"{optimizer}.beta2", 0.999),
        "optim.max_norm": Rule(f"{optimizer}.gradient_clipping", 1.0),
        "scheduler.type": Rule(
            f"{optimizer}.lr_scheduler_type",
            "constant",
            rules.one_of("constant", "linear", "cosine", otherwise="schedules are these three"),
        ),
        "scheduler.decay_steps": unless(None, "a linear schedule decays over all steps after the warmup"),
    }


def _project(value: Any, old: Old) -> Tree:
    return {"experiment_name": rules.name_of_run(value, old)} | ({"stats_logger.wandb.mode": "online"} if value else {})


def _steps(value: Any, _old: Old) -> Tree:
    if value is None:
        return {"total_train_epochs": Because(1000, "without max_steps prime-rl trains until it is stopped")}
    return {"total_train_steps": value}


def _checkpoints(value: Any, _old: Old) -> Tree:
    resume = Because("auto", "checkpoints to resume from")
    return {"saver.freq_steps": value, "recover.freq_steps": value, "recover.mode": resume}


def _evaluations(value: Any, _old: Old) -> Tree:
    return {"evaluator.freq_steps": value, "valid_dataset": {}}


def _devices(value: Any, _old: Old) -> Tree:
    return rules.on_devices(f"d{value}", value)


_ATTENTIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")

_SHARED = {
    "max_steps": Rule("total_train_steps, total_train_epochs", None, _steps),
    "output_dir": Rule("cluster.fileroot", why="a folder of all runs"),
    "monitors.wandb.project": Rule("experiment_name, stats_logger.wandb.mode", None, _project),
    "monitors.wandb.name": Rule("trial_name", None, rules.name_of_trial),
    "deployment.gpus_per_node": part_of("cluster.n_gpus_per_node", 8),
    "deployment.type": part_of("", "single_node"),
    "ckpt.interval": Rule("saver.freq_steps, recover.freq_steps, recover.mode", make=_checkpoints),
    "ckpt.resume_step": unless(None, "recover.mode=auto resumes from the last checkpoint"),
    "ckpt.keep_last": Rule("recover.keep_last", None, rules.if_given),
    "slurm": unless(None, "the launcher is chosen by the command: arealite train mode=slurm"),
}


def _batch(value: Any, old: Old) -> Because:
    group = old["orchestrator.train.group_size"]
    if old["orchestrator.token_batch_size"] is not None:
        return Because(MISSING, "prompts per step; prime-rl's batches are of tokens")
    return Because(max(1, value // group), f"prompts per step: {value} rollouts / {group}")


def _allocation(value: Any, old: Old) -> Tree:
    tensor, nodes = old["inference.vllm.tensor_parallel_size"], 1
    servers, trainer = value, old["deployment.num_train_gpus"]
    told = f"num_infer_gpus {servers}, tp {tensor}, num_train_gpus {trainer}"
    if old["deployment.type"] == "multi_node":
        of_servers = old["deployment.num_infer_nodes"] * old["deployment.num_infer_replicas"]
        of_trainer, per_node = old["deployment.num_train_nodes"], old["deployment.gpus_per_node"]
        nodes, servers, trainer = of_servers + of_trainer, of_servers * per_node, of_trainer * per_node
        told = f"{servers} GPUs of servers, {trainer} of the trainer"
    mode = f"vllm.d{max(1, servers // tensor)}p1t{tensor}+d{trainer}p1t1"
    return rules.on_devices(Because(mode, told), servers + trainer, nodes)


def _longest(value: Any, old: Old) -> Any:
    if value is not None:
        return value
    total = old["orchestrator.seq_len"] or old["seq_len"] or 2048
    return Because(total, "seq_len: prime-rl samples up to the end of the sequence")


def _lengths(value: Any, old: Old) -> Any:
    return NOTHING if "inference.vllm.max_model_len" in old else rules.if_given(value, old)


def _delta(value: Any, old: Old) -> Any:
    if old["trainer.loss.type"] != "default":
        return NOTHING
    low = old["trainer.loss.dppo_mask_low"]
    return value if low == value else Because(value, f"one bound of both signs; dppo_mask_low is {low}")


def _loss(value: Any, _old: Old) -> Because:
    if value != "default":
        raise MustDecide("losses are in docs/algorithms.md; one of your own: check-loss")
    told = "rewards minus the mean of their group; a token whose probability has moved further than "
    return Because("dppo", f"{told}dppo_delta is left out")


def _algorithm(value: Any, _old: Old) -> Any:
    (one,) = value if isinstance(value, list) and len(value) == 1 else [value]
    options = dict(one) if isinstance(one, dict) else {"type": one}
    name = options.pop("type", None) or options.pop("id", None)
    usual = {"loss_aggregation": "token", "sampling": {"source": "policy"}}
    changed = {key for key, what in options.items() if what and what != usual.get(key)} - {"failsafe_min_members"}
    if changed or name not in ("grpo", "default", "max_rl"):
        raise MustDecide("algorithms are in docs/algorithms.md")
    return {"actor.reward_scale": "group_mean"} if name == "max_rl" else NOTHING


def _environments(value: Any, _old: Old) -> Tree:
    ids = [_environment(one) for one in value or []]
    told = f"of {', '.join(ids)}; {_WHERE_ENVIRONMENTS_GO}" if ids else _WHERE_ENVIRONMENTS_GO
    if own := sorted({key for one in value or [] for key in one} & {"group_size", "sampling", "algo", "algorithms"}):
        told += f"; {', '.join(own)} of a single one: all have the same here"
    return {"train_dataset.path": Because(MISSING, told), "reward": Because(MISSING, "FILE.py:FUNCTION")}


def _environment(source: Any) -> str:
    """Return the name by which an environment is installed."""
    block = source.get("env", source)
    return str(source.get("id") or block.get("taskset", {}).get("id") or block.get("id") or source.get("name"))


def _sources(value: Any, _old: Old) -> Tree:
    """Keep data set, configuration and split of each source."""
    ours = {"dataset": "path", "subset": "config_name", "split": "split"}
    first, *others = [{ours[key]: one[key] for key in ours if key in one} for one in value]
    mixed: Tree = {"train_dataset.mixed_with": others} if others else {}
    return {f"train_dataset.{key}": what for key, what in first.items()} | mixed


def _nodes(value: Any, old: Old) -> Tree:
    total = value * old["deployment.gpus_per_node"]
    return rules.on_devices(f"d{total}", total, value)


def _staleness(value: Any, _old: Old) -> Tree:
    drop = Because("drop", "rollouts that are older are dropped, as in prime-rl")
    return {"rollout.max_head_offpolicyness": value, "rollout.overdue": drop}


def _concurrency(value: Any, old: Old) -> Any:
    group = old["orchestrator.train.group_size"]
    told = f"episodes: {value} rollouts / {group}"
    return NOTHING if value is None else Because(rules.at_least_one(value / group), told)


_WAYS = rules.only({"nccl": "broadcast", "filesystem": "disk"}, "weights go by these two ways")
_TRAINER = {f"trainer.{key}": rule for key, rule in _model("actor", "actor.optimizer").items()}

ALIASES = {
    "wandb.project": "monitors.wandb.project",
    "wandb.name": "monitors.wandb.name",
    "orchestrator.rollouts_per_example": "orchestrator.train.group_size",
    "orchestrator.group_size": "orchestrator.train.group_size",
    "orchestrator.max_inflight_rollouts": "orchestrator.concurrency.max_inflight",
    "orchestrator.max_inflight_episodes": "orchestrator.concurrency.max_inflight",
    "orchestrator.algorithms": "orchestrator.train.algo",
    "orchestrator.algo": "orchestrator.train.algo",
    "orchestrator.advantage": "orchestrator.train.algo",
    "orchestrator.env": "orchestrator.train.source",
    "orchestrator.train.env": "orchestrator.train.source",
    "orchestrator.eval.env": "orchestrator.eval.source",
    "inference.parallel.tp": "inference.vllm.tensor_parallel_size",
    "inference.model.max_model_len": "inference.vllm.max_model_len",
    "orchestrator.sampling.temperature": "orchestrator.train.sampling.temperature",
    "orchestrator.sampling.max_tokens": "orchestrator.train.sampling.max_completion_tokens",
    "orchestrator.sampling.max_completion_tokens": "orchestrator.train.sampling.max_completion_tokens",
    "orchestrator.train.sampling.max_tokens": "orchestrator.train.sampling.max_completion_tokens",
}
"""Older names of keys, which prime-rl still reads."""

RL: dict[str, Rule] = {
    **_SHARED,
    **_TRAINER,
    "model.name": Rule("actor.path", "Qwen/Qwen3-0.6B", rules.or_missing),
    "trainer.model.name": Rule("actor.path"),
    "orchestrator.model.name": Rule("actor.path"),
    "tokenizer.name": Rule("tokenizer_path"),
    "seq_len": Rule("vllm.max_model_len", None, _lengths),
    "orchestrator.seq_len": Rule("vllm.max_model_len", None, _lengths),
    "trainer.model.seq_len": Rule("actor.mb_spec.max_tokens_per_mb", why="tokens that are packed into a micro-batch"),
    "inference.vllm.max_model_len": Rule("vllm.max_model_len"),
    "deployment.num_train_gpus": part_of("allocation_mode", 1),
    "deployment.num_infer_gpus": Rule("allocation_mode, cluster", 1, _allocation),
    "deployment.num_train_nodes": part_of("allocation_mode", 1),
    "deployment.num_infer_nodes": part_of("allocation_mode", 1),
    "deployment.num_infer_replicas": part_of("allocation_mode", 1),
    "inference.vllm.tensor_parallel_size": part_of("allocation_mode", 1),
    "orchestrator.batch_size": Rule("train_dataset.batch_size", 128, _batch),
    "orchestrator.token_batch_size": unless(None, "batches are of prompts: train_dataset.batch_size"),
    "orchestrator.train.group_size": Rule("gconfig.n_samples", 1),
    "orchestrator.max_off_policy_steps": Rule("rollout.max_head_offpolicyness, rollout.overdue", 8, _staleness),
    "orchestrator.concurrency.max_inflight": Rule("rollout.max_concurrent_rollouts", None, _concurrency),
    "orchestrator.concurrency.initial_inflight": unless(None, "rollout.max_concurrent_rollouts holds from the start"),
    "orchestrator.train.algo": Rule("actor.algorithm, actor.reward_scale", make=_algorithm),
    "orchestrator.train.sampling.temperature": Rule("gconfig.temperature", 1.0),
    "orchestrator.train.sampling.max_completion_tokens": Rule("gconfig.max_new_tokens", None, _longest),
    "orchestrator.train.source": Rule("train_dataset.path, reward", None, _environments),
    "orchestrator.eval.interval": Rule("evaluator.freq_steps, valid_dataset", make=_evaluations),
    "orchestrator.eval.source": unless(None, "valid_dataset is what is evaluated"),
    "trainer.loss.type": Rule("actor.algorithm", "default", _loss),
    "trainer.loss.dppo_mask_high": Rule("actor.dppo_delta", 0.2, _delta),
    "trainer.loss.dppo_mask_low": part_of("actor.dppo_delta", 0.2),
    "trainer.loss.kl_tau": unless(
        None, "no penalty on the divergence from the rollout policy; actor.kl_ctl is to a reference"
    ),
    "trainer.loss.adv_tau": unless(1.0, "advantages have a weight of 1"),
    "trainer.scheduler.warmup_steps": Rule("actor.optimizer.warmup_steps_proportion", 0, _warmup),
    "trainer.scheduler.min_lr": Rule("actor.optimizer.min_lr_ratio", make=_min_lr("trainer.optim.lr")),
    "weight_broadcast.type": Rule("rollout.weight_update", make=_WAYS),
    "(one step per batch)": Rule("actor.ppo_n_minibatches", 1),
}
"""Keys of rl.toml. That its trainer takes one optimizer step per batch is no key."""

SFT: dict[str, Rule] = {
    **_SHARED,
    **_model("model", "model.optimizer"),
    "model.name": Rule("model.path", "Qwen/Qwen3-0.6B", rules.or_missing),
    "tokenizer.name": Rule("tokenizer_path"),
    "data.name": Rule(
        "train_dataset.path", None, lambda value, old: NOTHING if "data.source" in old else rules.or_missing(value, old)
    ),
    "data.source": Rule("train_dataset.path, train_dataset.split, train_dataset.mixed_with", make=_sources),
    "data.batch_size": Rule("train_dataset.batch_size", 128),
    "data.seq_len": Rule("train_dataset.max_length", 128, why="longer rows are left out"),
    "data.shuffle": Rule("train_dataset.shuffle", True),
    "data.micro_batch_size": unless(1, "model.mb_spec.max_tokens_per_mb bounds a micro-batch"),
    "data.pack_function": unless("cat", "micro-batches are always packed"),
    "deployment.num_gpus": Rule("allocation_mode, cluster", 1, _devices),
    "deployment.num_train_gpus": Rule("allocation_mode, cluster", make=_devices),
    "deployment.num_nodes": Rule("allocation_mode, cluster", make=_nodes),
    "val.interval": Rule("evaluator.freq_steps, valid_dataset", make=_evaluations),
    "scheduler.warmup_steps": Rule("model.optimizer.warmup_steps_proportion", 0, _warmup),
    "scheduler.min_lr": Rule("model.optimizer.min_lr_ratio", make=_min_lr("optim.lr")),
}
"""Keys of sft.toml."""

IGNORED = patterns(
    {
        "more options of wandb.init stand in stats_logger.wandb": "wandb.*",
        "metrics are in the run folder; more options of wandb.init stand in stats_logger.wandb": "monitors.*",
        "launcher.trainer_env_vars and launcher.inference_server_env_vars": "env_vars.*",
        "recover.mode=auto resumes from the last checkpoint": "resume*",
        "the launcher keeps the log of each process": "*log.*",
        "repeated and all-equal groups: actor.dynamic_sampling": "*filters*",
        "the chat template renders; tokens are kept as they were sampled": "orchestrator.renderer*",
        "valid_dataset and eval_gconfig": "orchestrator.eval.*",
        "options of vLLM servers go into the block vllm, which passes them on": "inference.*",
        "servers say themselves where they are": "weight_broadcast.*",
        "arealite train mode=slurm; launcher.slurm": "slurm.*",
        "checkpoints hold all that a run needs to resume": "ckpt.*",
        "valid_dataset is what is evaluated": "eval.*",
        "no choice here": "orchestrator.* trainer.* deployment.* model.* data.*",
        "a run never overwrites another one unasked": "clean_output_dir",
        "processes find free ports": "env_server_base_port",
        "benchmarks/ measures": "bench",
        "--dry-run shows the plan": "dry_run",
        "the chat template renders": "renderer*",
        "PyTorch's default": "matmul_precision",
        "the loss is PyTorch's": "loss_impl",
    }
)
"""Patterns of keys that have no place here, by why."""
