"""prime-rl's `rl.toml` and `sft.toml`, as of October 2026, with the keys of trainer, orchestrator and inference.

prime-rl counts rollouts per step; we count prompts. Its environments are packages of verifiers, whose place here is a
workflow, or a data set and a reward.
"""

from typing import Any

from arealite.api.config.schema import MISSING
from arealite.migrate.rules import (
    NOTHING,
    Because,
    MustDecide,
    Old,
    Rule,
    Tree,
    at_least_one,
    name_of_run,
    name_of_trial,
    only,
    or_missing,
    part_of,
    split,
    unless,
)

_WHERE_ENVIRONMENTS_GO = "environments of verifiers are a workflow here, or a data set and a reward: docs/workflows.md"


def _warmup(block: str, steps: str) -> Any:
    def make(value: Any, old: Old) -> Any:
        key, total = f"{block}.optimizer.warmup_steps_proportion", old["max_steps"]
        if not value:
            return {key: 0.0}
        return {
            key: Because(min(1.0, value / total), f"{value} of {total} steps") if total else Because(MISSING, steps)
        }

    return make


def _min_lr(block: str, lr: str) -> Any:
    return lambda value, old: {f"{block}.optimizer.min_lr_ratio": Because(value / old[lr], f"min_lr: {value} / lr")}


def _lora(block: str) -> dict[str, Rule]:
    """Return the rules of adapters, which a block switches on."""
    names = {"rank": "rank", "alpha": "alpha", "target_modules": "target_modules"}
    rules = {f"model.lora.{old}": Rule(f"{block}.lora.{new}") for old, new in names.items()}
    rules["model.lora.alpha"] = Rule(f"{block}.lora.alpha", make=lambda value, _: at_least_one(value))
    rules["model.lora.dropout"] = Rule(
        f"{block}.lora.dropout", make=lambda value, _: value if block == "model" and value else NOTHING
    )
    return rules


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
        "model.ep": unless(1, "mixtures of experts are not trained"),
        "model.fp8": unless(False, "training is in bfloat16 or float32"),
        "model.trust_remote_code": unless(False, "code of models is not run"),
        **_lora(block),
        "optim.type": Rule(f"{block}.optimizer.type", make=only({"adamw": "adam"}, "the optimizer is AdamW")),
        "optim.lr": Rule(f"{optimizer}.lr", 1e-06),
        "optim.weight_decay": Rule(f"{optimizer}.weight_decay", 0.01),
        "optim.betas1": Rule(f"{optimizer}.beta1", 0.9),
        "optim.betas2": Rule(f"{optimizer}.beta2", 0.999),
        "optim.max_norm": Rule(f"{optimizer}.gradient_clipping", 1.0),
        "scheduler.type": Rule(
            f"{optimizer}.lr_scheduler_type",
            "constant",
            only({one: one for one in ("constant", "linear", "cosine")}, "schedules are these three"),
        ),
        "scheduler.decay_steps": unless(None, "a linear schedule decays over all steps after the warmup"),
    }


def _project(value: Any, old: Old) -> Tree:
    return {"experiment_name": name_of_run(value, old)} | ({"stats_logger.wandb.mode": "online"} if value else {})


def _steps(value: Any, _old: Old) -> Tree:
    if value is None:
        return {"total_train_epochs": Because(1000, "without max_steps prime-rl trains until it is stopped")}
    return {"total_train_steps": value}


_ATTENTIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")

_SHARED = {
    "max_steps": Rule("total_train_steps, total_train_epochs", None, _steps),
    "output_dir": Rule("cluster.fileroot", why="a folder of all runs"),
    "wandb.project": Rule("experiment_name, stats_logger.wandb.mode", None, _project),
    "wandb.name": Rule("trial_name", None, name_of_trial),
    "deployment.gpus_per_node": part_of("cluster.n_gpus_per_node", 8),
    "deployment.type": part_of("", "single_node"),
    "ckpt.interval": Rule(
        "saver.freq_steps, recover.freq_steps, recover.mode",
        make=lambda value, old: {
            "saver.freq_steps": value,
            "recover.freq_steps": value,
            "recover.mode": Because("auto", "checkpoints to resume from"),
        },
    ),
    "ckpt.resume_step": unless(None, "recover.mode=auto resumes from the last checkpoint"),
    "ckpt.keep_last": Rule("recover.keep_last", None, lambda value, _: NOTHING if value is None else value),
    "slurm": unless(None, "the launcher is chosen by the command: arealite train mode=slurm"),
}


def _batch(value: Any, old: Old) -> Any:
    group = old["orchestrator.group_size"]
    if value is None:
        return {"train_dataset.batch_size": Because(MISSING, "prompts per step; prime-rl's batches are of tokens")}
    told = f"prompts per step: {value} rollouts / {group}"
    return {"train_dataset.batch_size": Because(max(1, value // group), told)}


def _allocation(value: Any, old: Old) -> Tree:
    tensor = old["inference.parallel.tp"]
    if old["deployment.type"] == "multi_node":
        nodes, replicas = old["deployment.num_infer_nodes"], old["deployment.num_infer_replicas"]
        per_node, train = old["deployment.gpus_per_node"], old["deployment.num_train_nodes"]
        infer = nodes * replicas * per_node
        mode = f"vllm.d{max(1, infer // tensor)}p1t{tensor}+d{train * per_node}p1t1"
        cluster = split((nodes * replicas + train) * per_node, nodes * replicas + train)
        return {
            "allocation_mode": Because(mode, f"{infer} GPUs of servers, {train * per_node} of the trainer"),
            **cluster,
        }
    servers, trainer = value, old["deployment.num_train_gpus"]
    mode = f"vllm.d{max(1, servers // tensor)}p1t{tensor}+d{trainer}p1t1"
    told = f"num_infer_gpus {servers}, tp {tensor}, num_train_gpus {trainer}"
    return {"allocation_mode": Because(mode, told), **split(servers + trainer)}


def _longest(value: Any, old: Old) -> Any:
    if value is not None:
        return value
    total = old["orchestrator.seq_len"] or old["seq_len"] or 2048
    return Because(total, "seq_len: prime-rl samples up to the end of the sequence")


def _lengths(value: Any, old: Old) -> Any:
    return (
        {"vllm.max_model_len": value} if value is not None and "inference.model.max_model_len" not in old else NOTHING
    )


def _delta(value: Any, old: Old) -> Any:
    if old["trainer.loss.type"] != "default":
        return NOTHING
    low = old["trainer.loss.dppo_mask_low"]
    told = "" if low == value else f"one bound of both signs; dppo_mask_low is {low}"
    return {"actor.dppo_delta": Because(value, told) if told else value}


def _loss(value: Any, _old: Old) -> Any:
    if value != "default":
        raise MustDecide("losses are in docs/algorithms.md; one of your own: check-loss")
    return {
        "actor.algorithm": Because(
            "dppo",
            "rewards minus the mean of their group; a token whose probability has moved "
            "further than dppo_delta is left out",
        )
    }


def _algorithms(value: Any, _old: Old) -> Any:
    names = [one.get("id", one.get("type")) if isinstance(one, dict) else one for one in value]
    if names == ["max_rl"]:
        return {"actor.reward_scale": "group_mean"}
    if names != ["grpo"]:
        raise MustDecide("algorithms are in docs/algorithms.md")
    return NOTHING


def _environments(value: Any, _old: Old) -> Tree:
    ids = [str(one.get("id") or (one.get("taskset") or {}).get("id") or one.get("name")) for one in value or []]
    told = f"of {', '.join(ids)}; {_WHERE_ENVIRONMENTS_GO}" if ids else _WHERE_ENVIRONMENTS_GO
    return {"train_dataset.path": Because(MISSING, told), "reward": Because(MISSING, "FILE.py:FUNCTION")}


def _concurrency(value: Any, old: Old) -> Any:
    group = old["orchestrator.group_size"]
    return NOTHING if value is None else Because(at_least_one(value / group), f"episodes: {value} rollouts / {group}")


_LOSS_STEPS = "steps of warmup, as a share of all"
_TRAINER = {f"trainer.{key}": rule for key, rule in _model("actor", "actor.optimizer").items()}

ALIASES = {
    "orchestrator.rollouts_per_example": "orchestrator.group_size",
    "orchestrator.env": "orchestrator.train.env",
    "orchestrator.sampling.temperature": "orchestrator.train.sampling.temperature",
    "orchestrator.sampling.max_tokens": "orchestrator.train.sampling.max_completion_tokens",
    "orchestrator.sampling.max_completion_tokens": "orchestrator.train.sampling.max_completion_tokens",
    "orchestrator.train.sampling.max_tokens": "orchestrator.train.sampling.max_completion_tokens",
}
"""Older names of keys, which prime-rl still reads."""

RL: dict[str, Rule] = {
    **_SHARED,
    **_TRAINER,
    "model.name": Rule("actor.path", "Qwen/Qwen3-0.6B", or_missing),
    "trainer.model.name": Rule("actor.path"),
    "orchestrator.model.name": Rule("actor.path"),
    "tokenizer.name": Rule("tokenizer_path"),
    "seq_len": Rule("vllm.max_model_len", None, _lengths),
    "orchestrator.seq_len": Rule("vllm.max_model_len", None, _lengths),
    "trainer.model.seq_len": Rule("actor.mb_spec.max_tokens_per_mb", why="tokens that are packed into a micro-batch"),
    "inference.model.max_model_len": Rule("vllm.max_model_len"),
    "deployment.num_train_gpus": part_of("allocation_mode", 1),
    "deployment.num_infer_gpus": Rule("allocation_mode, cluster", 1, _allocation),
    "deployment.num_train_nodes": part_of("allocation_mode", 1),
    "deployment.num_infer_nodes": part_of("allocation_mode", 1),
    "deployment.num_infer_replicas": part_of("allocation_mode", 1),
    "inference.parallel.tp": part_of("allocation_mode", 1),
    "orchestrator.batch_size": Rule("train_dataset.batch_size", None, _batch),
    "orchestrator.token_batch_size": unless(None, "batches are of prompts: train_dataset.batch_size"),
    "orchestrator.group_size": Rule("gconfig.n_samples", 1),
    "orchestrator.max_off_policy_steps": Rule(
        "rollout.max_head_offpolicyness, rollout.overdue",
        8,
        lambda value, _: {
            "rollout.max_head_offpolicyness": value,
            "rollout.overdue": Because("drop", "rollouts that are older are dropped, as in prime-rl"),
        },
    ),
    "orchestrator.max_inflight_rollouts": Rule("rollout.max_concurrent_rollouts", None, _concurrency),
    "orchestrator.algorithms": Rule("actor.algorithm, actor.reward_scale", make=_algorithms),
    "orchestrator.train.sampling.temperature": Rule("gconfig.temperature", 1.0),
    "orchestrator.train.sampling.max_completion_tokens": Rule("gconfig.max_new_tokens", None, _longest),
    "orchestrator.train.env": Rule("train_dataset.path, reward", None, _environments),
    "orchestrator.eval.interval": Rule(
        "evaluator.freq_steps, valid_dataset",
        make=lambda value, _: {"evaluator.freq_steps": value, "valid_dataset": {}},
    ),
    "orchestrator.eval.env": unless(None, "valid_dataset is what is evaluated"),
    "trainer.loss.type": Rule("actor.algorithm", "default", _loss),
    "trainer.loss.dppo_mask_high": Rule("actor.dppo_delta", 0.2, _delta),
    "trainer.loss.dppo_mask_low": part_of("actor.dppo_delta", 0.2),
    "trainer.loss.kl_tau": unless(
        None, "no penalty on the divergence from the rollout policy; actor.kl_ctl is to a reference"
    ),
    "trainer.loss.adv_tau": unless(1.0, "advantages have a weight of 1"),
    "trainer.scheduler.warmup_steps": Rule("actor.optimizer.warmup_steps_proportion", 0, _warmup("actor", _LOSS_STEPS)),
    "trainer.scheduler.min_lr": Rule("actor.optimizer.min_lr_ratio", make=_min_lr("actor", "trainer.optim.lr")),
    "weight_broadcast.type": Rule(
        "rollout.weight_update", make=only({"nccl": "broadcast", "filesystem": "disk"}, "weights go by these two ways")
    ),
    "(one step per batch)": Rule("actor.ppo_n_minibatches", 1),
}
"""Keys of rl.toml. That its trainer takes one optimizer step per batch is no key."""

SFT: dict[str, Rule] = {
    **_SHARED,
    **_model("model", "model.optimizer"),
    "model.name": Rule("model.path", "Qwen/Qwen3-0.6B", or_missing),
    "tokenizer.name": Rule("tokenizer_path"),
    "data.name": Rule(
        "train_dataset.path", None, lambda value, old: NOTHING if "data.source" in old else or_missing(value, old)
    ),
    "data.source": Rule(
        "train_dataset.path, train_dataset.mixed_with",
        make=lambda value, _: {
            "train_dataset.path": value[0]["dataset"],
            **({"train_dataset.mixed_with": [{"path": one["dataset"]} for one in value[1:]]} if value[1:] else {}),
        },
    ),
    "data.batch_size": Rule("train_dataset.batch_size", 128),
    "data.seq_len": Rule("train_dataset.max_length", 128, why="longer rows are left out"),
    "data.shuffle": Rule("train_dataset.shuffle", True),
    "data.micro_batch_size": unless(1, "model.mb_spec.max_tokens_per_mb bounds a micro-batch"),
    "data.pack_function": unless("cat", "micro-batches are always packed"),
    "deployment.num_gpus": Rule(
        "allocation_mode, cluster", 1, lambda value, _: {"allocation_mode": f"d{value}", **split(value)}
    ),
    "deployment.num_train_gpus": Rule(
        "allocation_mode, cluster", make=lambda value, _: {"allocation_mode": f"d{value}", **split(value)}
    ),
    "val.interval": Rule(
        "evaluator.freq_steps, valid_dataset",
        make=lambda value, _: {"evaluator.freq_steps": value, "valid_dataset": {}},
    ),
    "scheduler.warmup_steps": Rule("model.optimizer.warmup_steps_proportion", 0, _warmup("model", _LOSS_STEPS)),
    "scheduler.min_lr": Rule("model.optimizer.min_lr_ratio", make=_min_lr("model", "optim.lr")),
}
"""Keys of sft.toml."""

IGNORED = {
    "wandb.*": "more options of wandb.init stand in stats_logger.wandb",
    "*log.*": "the launcher keeps the log of each process",
    "*filters*": "repeated and all-equal groups: actor.dynamic_sampling",
    "orchestrator.renderer*": "the chat template renders; tokens are kept as they were sampled",
    "orchestrator.eval.*": "valid_dataset and eval_gconfig",
    "orchestrator.*": "no choice here",
    "trainer.*": "no choice here",
    "inference.*": "options of vLLM servers stand in the block vllm, and pass through",
    "weight_broadcast.*": "servers say themselves where they are",
    "deployment.*": "no choice here",
    "slurm.*": "arealite train mode=slurm; launcher.slurm",
    "ckpt.*": "checkpoints hold all that a run needs to resume",
    "eval.*": "valid_dataset is what is evaluated",
    "model.*": "no choice here",
    "data.*": "no choice here",
    "clean_output_dir": "a run never overwrites another one unasked",
    "env_server_base_port": "processes find free ports",
    "bench": "benchmarks/ measures",
    "dry_run": "--dry-run shows the plan",
    "renderer*": "the chat template renders",
    "matmul_precision": "PyTorch's default",
    "loss_impl": "the loss is PyTorch's",
}
"""Patterns of keys that have no place here, and why."""
