"""The memory plan: what trainer ranks and servers need, compared with this node's GPUs or, on the CPU, its memory."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from rich.table import Column, Table
from transformers import PreTrainedModel

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import BaseExperimentConfig as Config
from arealite.api.cli_args import PPOActorConfig
from arealite.cli.check.findings import Findings, Level
from arealite.engine.hf_model import build_meta_model
from arealite.inference.backends import kind_of
from arealite.launcher.plan.servers import foreign_servers
from arealite.utils.memory_plan import ModelShape, kv_bytes_per_token, model_shape, training_state, training_step

GIB = 2**30
_TIGHT = 0.85  # of a device; what the plan leaves out needs the rest
_SERVER_SHARE = 0.9  # of a GPU that SGLang and vLLM take unless told
_MORE_RANKS = "Use more trainer ranks in allocation_mode, a smaller model, or {key}.fsdp.offload_params=true."
_KNOBS = {
    "activations": "Set {key}.gradient_checkpointing=true, or lower {key}.mb_spec.max_tokens_per_mb.",
    "whole gradients": "Let a batch be one micro-batch (raise {key}.mb_spec.max_tokens_per_mb, or more trainer ranks).",
    "servers' cache": "Lower lite.slots or lite.context.",
}

Parts = dict[str, int]  # bytes by what they are for


def check_memory(found: Findings, config: Config, model: PreTrainedModel, longest_prompt: int) -> None:
    """Plan a run that trains for the devices of this node, and print the plan."""
    if config.allocation_mode and AllocationMode.from_str(config.allocation_mode).train_world_size > 0:
        gpus = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
        memory = psutil.virtual_memory().total
        teacher: Any = getattr(config, "teacher", None)
        if teacher is not None:
            path = teacher["path"] if isinstance(teacher, dict) else teacher.path
            teacher = model_shape(build_meta_model(path, model.config._attn_implementation))
        shape = model_shape(model)
        plan = plan_memory(found, config, shape, longest_prompt, gpus=gpus, host=memory, teacher=teacher)
        found.console.print("", plan)


def plan_memory(
    found: Findings,
    config: Config,
    shape: ModelShape,
    longest_prompt: int,
    *,
    gpus: Sequence[int],
    host: int,
    teacher: ModelShape | None = None,
) -> Table:
    """Add up what trainer ranks and servers need, hold it against the bytes of the devices, and return the plan."""
    mode, (key, block) = AllocationMode.from_str(config.allocation_mode), config.trained
    longest = longest_prompt + (config.sampling.max_new_tokens if config.sampling is not None else 0)
    ranks, offloads = mode.train_world_size, block.fsdp.offload_params
    state, step = _trainer_parts(config, shape, longest, ranks)
    if teacher is not None:
        state |= {"teacher": training_state(teacher, ranks=ranks, has_optimizer=False)["parameters"]}
    server, kv_token = _server_parts(config, shape, longest, mode)
    if config.cluster.n_gpus_per_node == 0:
        together = {name: size * ranks for name, size in (state | step).items()}
        together |= {f"servers' {name}": size * mode.gen_dp_size for name, size in server.items()}
        _fit(found, "the run", together, host, key)
    elif not gpus:
        found.add("warning", "no GPU here to hold the plan against", "Compare it with the GPUs you will use.")
    else:
        _fit(found, "a trainer rank", step if offloads else state | step, min(gpus), key)
        if offloads:
            _fit(found, "the host", {name: size * ranks for name, size in state.items()}, host, key)
        if server:
            _fit_completions(found, config, server, kv_token, longest, min(gpus))
    return _plan(state | step, ranks, server, mode.gen_world_size)


def _trainer_parts(config: Config, shape: ModelShape, longest: int, ranks: int) -> tuple[Parts, Parts]:
    """Return what a rank holds all the time, and on top in a step of sequences of full length."""
    block, rows = config.trained[1], config.train_dataset.batch_size
    value_bytes, whole = getattr(torch, block.dtype).itemsize, dataclasses.replace(shape, num_frozen=0)
    state = training_state(shape, ranks=ranks, has_optimizer=True, compute_bytes=value_bytes)
    if config.rollout is not None and config.sampling is not None:
        num_minibatches = block.ppo_n_minibatches if isinstance(block, PPOActorConfig) else 1
        rows = -(-config.rollout.consumer_batch_size // num_minibatches) * config.sampling.n_samples
    if config.has_critic:
        state["critic"] = sum(training_state(whole, ranks=ranks, has_optimizer=True).values())
    if config.has_reference:
        state["reference"] = training_state(whole, ranks=ranks, has_optimizer=False)["parameters"]
    tokens, spec = -(-rows // ranks) * max(longest, 1), block.mb_spec
    micro = -(-tokens // spec.n_mbs)
    if spec.max_tokens_per_mb is not None:
        micro = min(micro, max(spec.max_tokens_per_mb, longest))
    step = training_step(
        shape,
        tokens=micro,
        compute_bytes=value_bytes,
        accumulates=micro < tokens,
        recomputes=block.gradient_checkpointing,
    )
    return state, step


def _server_parts(config: Config, shape: ModelShape, longest: int, mode: AllocationMode) -> tuple[Parts, int]:
    """Return what a GPU of a server needs (all of a server on a CPU), and of it the bytes per token."""
    rollout, sampling = config.rollout, config.sampling
    if rollout is None or sampling is None or mode.gen_dp_size == 0 or foreign_servers(config):
        return {}, 0
    kind = kind_of(config)
    dtype = getattr(torch, str(kind.block(config).get("dtype", config.trained[1].dtype)), torch.bfloat16)
    weights = shape.num_parameters * dtype.itemsize // mode.gen_tp_size
    kv_token = kv_bytes_per_token(shape, value_bytes=dtype.itemsize, gpus=mode.gen_tp_size)
    episodes = rollout.max_concurrent_rollouts or rollout.consumer_batch_size
    sequences = -(-episodes * sampling.n_samples // mode.gen_dp_size)
    if not kind.is_embedded:
        return {"weights": weights, "cache": sequences * longest * kv_token}, kv_token
    cache = min(sequences, config.lite.slots) * min(longest, config.lite.context) * kv_token
    return {"weights": weights, "next weights": weights, "cache": cache}, kv_token


def _fit(found: Findings, who: str, parts: Parts, device: int, key: str) -> None:
    """Hold the sum of the parts against a device; what does not fit names the knob of the largest part."""
    needed = sum(parts.values())
    told = f"{who} needs about {needed / GIB:.2f} of {device / GIB:.1f} GiB"
    if needed <= _TIGHT * device:
        return found.add("ok", told)
    largest = max(parts, key=lambda name: parts[name])
    told += f", most of it {largest} ({parts[largest] / GIB:.2f})"
    found.add("problem" if needed > device else "warning", told, _KNOBS.get(largest, _MORE_RANKS).format(key=key))


def _fit_completions(found: Findings, config: Config, server: Parts, kv_token: int, longest: int, gpu: int) -> None:
    """Compare the cache that a server has room for with the completions it must hold at once."""
    kind = kind_of(config)
    share = float(kind.block(config).get(kind.memory_flag) or _SERVER_SHARE)
    room = (int(gpu * share) - sum(server.values()) + server["cache"]) // kv_token
    asked = server["cache"] // kv_token
    level: Level = "problem" if room < longest else "warning" if room < asked else "ok"
    told = (
        f"a server's cache holds {max(room, 0):,} of the {asked:,} tokens asked for at once, {longest:,} a completion"
    )
    knobs = "Raise t of the servers in allocation_mode, or lower gconfig.max_new_tokens or max_concurrent_rollouts."
    found.add(level, told, "" if level == "ok" else knobs)


def _plan(trainer: Parts, num_ranks: int, server: Parts, num_gpus: int) -> Table:
    """Return the plan of the devices, in GiB."""
    numbers = [Column(name, justify="right") for name in ("each", "all")]
    table = Table("GiB for sequences of full length", *numbers, box=None, pad_edge=False)
    for name, parts, count in (("trainer rank", trainer, num_ranks), ("server", server, num_gpus)):
        for label, size in ({name: sum(parts.values())} | parts).items():
            if size > 0:
                values = (f"{value / GIB:,.3f}" for value in (size, size * count))
                table.add_row(label if label == name else f"  {label}", *values, style="bold" if label == name else "")
    return table
