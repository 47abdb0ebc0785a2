"""The memory plan: the needs of trainer ranks and servers, compared with the GPUs or, on the CPU, the host's memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.table import Column, Table
from transformers import PreTrainedModel

from arealite.api.alloc_mode import AllocationMode, ParallelSizes
from arealite.api.cli_args import BaseExperimentConfig as Config
from arealite.api.cli_args import OptimizerConfig, TrainEngineConfig
from arealite.cli.check.findings import Findings, Level
from arealite.cli.check.model import context_of
from arealite.engine.hf_model import build_meta_model
from arealite.engine.parallel.layers import check_sizes
from arealite.inference.backends.program import SHARED_MEMORY, ServerProgram
from arealite.launcher.plan.jobs import mesh_lines
from arealite.launcher.plan.layout import foreign_servers, make_layout
from arealite.launcher.plan.plan import make_plan
from arealite.planner.memory import (
    FLOAT32,
    ModelShape,
    kv_bytes_per_token,
    model_shape,
    shape_of_rank,
    training_state,
    training_step,
)
from arealite.utils.devices import Node

GIB = 2**30
_TIGHT = 0.85  # of a device; the plan omits allocator and library overhead
_SERVER_SHARE = 0.9  # of a GPU: default of SGLang and vLLM
_MORE_RANKS = "{more}, use a smaller model, or {key}.fsdp.offload_params=true."
_MOMENT_BYTES = {"adam": FLOAT32, "adam_bf16": 2}
_KNOBS = {
    "AdamW moments": "{more}, use a smaller model, {key}.optimizer.type=adam_bf16, or {key}.fsdp.offload_params=true.",
    "activations": "Set {key}.gradient_checkpointing=true, lower {key}.mb_spec.max_tokens_per_mb, or raise c or "
    "t of the trainer in allocation_mode. On GPUs {key}.activation_offloading=true moves what is left to the host.",
    "gathered weights": "Raise t of the trainer in allocation_mode, or use a smaller model.",
    "output layer": "Raise t of the trainer in allocation_mode, or its c, or lower {key}.mb_spec.max_tokens_per_mb.",
    "whole gradients": "Set {key}.fsdp.reduce_once=false, or t or c instead of p in allocation_mode.",
    "servers' cache": "Lower lite.slots or lite.context.",
    "its server": "Lower what servers take: sglang.mem_fraction_static or vllm.gpu_memory_utilization.",
}

Parts = dict[str, int]  # bytes by purpose


@dataclass(frozen=True)
class _Ranks:
    """The memory that each rank of a group always holds, and needs on top in a step of full-length sequences."""

    who: str
    key: str  # of the block whose step takes most
    more: str  # how to get more ranks
    count: int
    offloads: bool
    state: Parts
    step: Parts


def check_memory(
    findings: Findings,
    config: Config,
    model: PreTrainedModel,
    longest_prompt: int,
    node: Node,
) -> None:
    """Print the memory plan of a run that trains on a node."""
    if config.allocation_mode and AllocationMode.from_str(config.allocation_mode).train_world_size > 0:
        used = {device for one in make_plan(config).placements for device in one.devices}
        gpus = [gpu for number, gpu in enumerate(node.gpus) if number in used or not used]
        for gpu in gpus:
            if gpu.free < _TIGHT * gpu.memory:
                text = f"GPU {gpu.index} has {gpu.free / GIB:.1f} of {gpu.memory / GIB:.1f} GiB free"
                findings.add(
                    "warning", text, "End what uses it (nvidia-smi), or choose others by CUDA_VISIBLE_DEVICES."
                )
        shape, (_, block) = model_shape(model), config.trained
        paths = {role: path for role in _beside(config) if (path := _path(config, role)) not in (None, block.path)}
        attention = model.config._attn_implementation
        others = {role: model_shape(_divisible(config, role, path, attention)) for role, path in paths.items()}
        new = config.sampling.max_new_tokens if config.sampling is not None else 0
        longest = int(min(longest_prompt + new, context_of(config, model)))
        room = [gpu.memory for gpu in gpus]
        plan = plan_memory(findings, config, shape, longest, gpus=room, host=node.memory, others=others)
        if not findings.is_brief:
            train = AllocationMode.from_str(config.allocation_mode).train
            mesh = mesh_lines(train) if config.workers is None else []
            findings.console.print("", plan, "", *mesh, sep="\n", markup=False)


def plan_memory(
    findings: Findings,
    config: Config,
    shape: ModelShape,
    longest: int,
    *,
    gpus: Sequence[int],
    host: int,
    others: Mapping[str, ModelShape] | None = None,
) -> Table:
    """Add up the needs of trainer ranks or workers and servers, compare them with the bytes of the devices, and return
    the plan; `others` are the shapes of roles whose model is not the trained one."""
    mode, key = AllocationMode.from_str(config.allocation_mode), config.trained[0]
    groups = _groups(config, {key: shape, **(others or {})}, longest, mode.train_world_size)
    server, kv_token = _server_parts(config, shape, longest, mode)
    if mode.is_colocated:  # on the device of the only rank, in its steps, too
        (rank,), of_server = groups, {f"servers' {name}": size for name, size in server.items()}
        groups, server = [replace(rank, step=rank.step | of_server)], {}
    if config.cluster.n_gpus_per_node == 0:
        together: Parts = {}
        for group in groups:
            for name, size in (group.state | group.step).items():
                together[name] = together.get(name, 0) + size * group.count
        together |= {f"servers' {name}": size * mode.gen_dp_size for name, size in server.items()}
        _fit(findings, "the run", together, host, groups[0])
    elif not gpus:
        findings.add("warning", "no GPU here to hold the plan against", "Compare it with the GPUs you will use.")
    else:
        for group in groups:
            _fit(findings, group.who, group.step if group.offloads else group.state | group.step, min(gpus), group)
            if mode.takes_turns:
                awake = {"its server": int(min(gpus) * _server_share(config))} | ({} if group.offloads else group.state)
                _fit(findings, f"{group.who} beside its server that is awake", awake, min(gpus), group)
            if group.offloads:
                whole = {name: size * group.count for name, size in group.state.items()}
                _fit(findings, "the host", whole, host, group)
        if server:
            _fit_completions(findings, config, server, kv_token, longest, min(gpus))
    return _plan(groups, server, mode.gen.world_size)


def _beside(config: Config) -> list[str]:
    """Return the roles beside the trained one."""
    has = {"critic": config.has_critic, "ref": config.has_reference, "teacher": getattr(config, "teacher", None)}
    return [role for role, is_there in has.items() if is_there]


def _divisible(config: Config, role: str, path: str, attention: str) -> PreTrainedModel:
    """Build the model of a role without its weights; its ranks must be able to divide it."""
    model = build_meta_model(path, attention)
    check_sizes(model, ParallelSizes.from_str(_block(config, role).parallel or "d1"))
    return model


def _path(config: Config, role: str) -> str | None:
    block: Any = getattr(config, role, None)
    return block.get("path") if isinstance(block, dict) else getattr(block, "path", None)


def _block(config: Config, role: str) -> TrainEngineConfig:
    """Return the block of a role; a block that only the script reads is replaced by that of the trained model."""
    block = getattr(config, role)
    return block if isinstance(block, TrainEngineConfig) else config.trained[1]


def _groups(config: Config, shapes: Mapping[str, ModelShape], longest: int, ranks: int) -> list[_Ranks]:
    """Return the ranks of a script, each with all roles, or the groups of workers."""
    key, roles = config.trained[0], (config.trained[0], *_beside(config))
    shapes = dict.fromkeys(roles, replace(shapes[key], num_frozen=0)) | dict(shapes)
    if config.workers is None:
        groups = [("a trainer rank", "Use more trainer ranks in allocation_mode", roles, ranks)]
    else:
        groups = [
            (f"a worker of {one.name}", f"Raise workers.{one.name}.ranks", one.roles, one.num_ranks)
            for one in make_layout(config, roles)
        ]
    ranks_of_groups = []
    for who, more, held, count in groups:
        first, *_ = own = [role for role in roles if role in held]  # the policy, else the critic
        state, step = _state(config, shapes, own, count), _step(config, shapes[first], longest, first, count)
        ranks_of_groups.append(_Ranks(who, first, more, count, _block(config, first).fsdp.offload_params, state, step))
    return ranks_of_groups


def _of_rank(block: TrainEngineConfig, shape: ModelShape, ranks: int) -> tuple[ParallelSizes, ModelShape, int]:
    """Return how `ranks` divide a model, what of it one has before FSDP, and over how many ranks FSDP shards that."""
    sizes, copies = ParallelSizes.from_str(block.parallel or f"d{ranks}"), block.fsdp.dp_replicate
    return sizes, shape_of_rank(shape, sizes, copies=copies), sizes.data * sizes.context // copies or 1


def _state(config: Config, shapes: Mapping[str, ModelShape], roles: Iterable[str], ranks: int) -> Parts:
    """Add up the memory that a rank holds for its roles."""
    trained, state = config.trained[0], Parts()
    for role in roles:
        block = _block(config, role)
        optimizer = block.optimizer or OptimizerConfig()
        _, shape, num_shards = _of_rank(block, shapes[role], ranks)
        parts = training_state(
            shape,
            ranks=num_shards,
            has_optimizer=role in (trained, "critic"),
            compute_bytes=getattr(torch, config.trained[1].dtype).itemsize,
            moment_bytes=_MOMENT_BYTES[optimizer.type],
        )
        state |= parts if role == trained else {"reference" if role == "ref" else role: sum(parts.values())}
    return state


def _step(config: Config, shape: ModelShape, longest: int, role: str, ranks: int) -> Parts:
    """Return the needs of a rank in a step of full-length sequences: a frozen role keeps one layer, and no logits."""
    block = _block(config, role)
    is_trained, rows = role in (config.trained[0], "critic"), config.train_dataset.batch_size
    if config.rollout is not None and config.sampling is not None:
        num_minibatches = getattr(block, "ppo_n_minibatches", 1) if is_trained else 1
        rows = -(-config.rollout.consumer_batch_size // num_minibatches) * config.sampling.n_samples
    sizes, shape, num_shards = _of_rank(block, shape, ranks)
    tokens, spec = -(-rows // sizes.data) * max(longest, 1), block.mb_spec
    micro = -(-tokens // spec.n_mbs)
    if spec.max_tokens_per_mb is not None:
        micro = min(micro, max(spec.max_tokens_per_mb, longest))
    if role == "critic":
        shape = replace(shape, vocab=1)
    return training_step(
        shape if is_trained else replace(shape, num_layers=0, num_frozen=shape.num_parameters),
        tokens=-(-micro // sizes.context),
        ranks=num_shards,
        compute_bytes=getattr(torch, block.dtype).itemsize,
        outer_bytes=FLOAT32 if block.cast_lm_head_to_fp32 else None,
        accumulates=micro < tokens and block.fsdp.reduce_once,
        recomputes=block.gradient_checkpointing or not is_trained,
        offloads=block.activation_offloading,
        is_gloo=config.cluster.n_gpus_per_node == 0,
    )


def _server_parts(config: Config, shape: ModelShape, longest: int, mode: AllocationMode) -> tuple[Parts, int]:
    """Return the needs of a GPU of a server (of the whole server on a CPU), and the cache's bytes per token."""
    rollout, sampling = config.rollout, config.sampling
    if rollout is None or sampling is None or mode.gen_dp_size == 0 or foreign_servers(config):
        return {}, 0
    kind = config.server_kind
    dtype = getattr(torch, str(ServerProgram(config).flags.get("dtype", config.trained[1].dtype)), torch.bfloat16)
    weights = shape.num_parameters * dtype.itemsize // mode.gen_tp_size
    kv_token = kv_bytes_per_token(shape, value_bytes=dtype.itemsize, gpus=mode.gen_tp_size)
    sequences = -(-rollout.concurrency * sampling.n_samples // mode.gen_dp_size)
    if not kind.is_embedded:
        return {"weights": weights, "cache": sequences * longest * kv_token}, kv_token
    slots = min(sequences, config.lite.slots) + 1  # the spare one
    held = {"cache": slots * min(longest, config.lite.context) * kv_token}
    if config.cluster.n_gpus_per_node if mode.is_colocated else config.lite.device == "cuda":  # from the start
        held = {"cache": (config.lite.slots + 1) * config.lite.context * kv_token}
    if mode.is_colocated:
        return _colocated_parts(config, weights, shape) | held, kv_token
    if config.lite.device == "cuda":  # new weights wait on the host
        return {"weights": weights} | held, kv_token
    return {"weights": weights, "next weights": weights} | held, kv_token


def _colocated_parts(config: Config, weights: int, shape: ModelShape) -> Parts:
    """Return the weights of a server in the trainer's process beside the trainer's own: none, or a copy in the server's
    dtype, and during a publication another in the published dtype."""
    trained = config.trained[1]
    if trained.lora is None and trained.dtype == config.lite.dtype == "float32":
        return {}
    return {"weights": weights, "next weights": shape.num_parameters * getattr(torch, trained.dtype).itemsize}


def _fit(findings: Findings, who: str, parts: Parts, device: int, ranks: _Ranks) -> None:
    """Compare the sum of the parts with a device; if it does not fit, name the knob of the largest part."""
    needed = sum(parts.values())
    text = f"{who} needs about {needed / GIB:.2f} of {device / GIB:.1f} GiB"
    if needed <= _TIGHT * device:
        return findings.add("ok", text)
    largest = max(parts, key=lambda name: parts[name])
    text += f", most of it {largest} ({parts[largest] / GIB:.2f})"
    findings.add(
        "problem" if needed > device else "warning",
        text,
        _KNOBS.get(largest, _MORE_RANKS).format(key=ranks.key, more=ranks.more),
    )


def _fit_completions(findings: Findings, config: Config, server: Parts, kv_token: int, longest: int, gpu: int) -> None:
    """Compare the cache that fits a server with the completions it must hold at once."""
    room = (int(gpu * _server_share(config)) - sum(server.values()) + server["cache"]) // kv_token
    asked = server["cache"] // kv_token
    level: Level = "problem" if room < longest else "warning" if room < asked else "ok"
    text = (
        f"a server's cache holds {max(room, 0):,} of the {asked:,} tokens asked for at once, {longest:,} a completion"
    )
    knobs = "Raise t of the servers in allocation_mode, or lower gconfig.max_new_tokens or max_concurrent_rollouts."
    findings.add(level, text, "" if level == "ok" else knobs)


def _server_share(config: Config) -> float:
    """Return the share of a GPU of a server that is awake."""
    program, takes_turns = ServerProgram(config), AllocationMode.from_str(config.allocation_mode).takes_turns
    return float(program.flags.get(program.kind.memory_flag) or (SHARED_MEMORY if takes_turns else _SERVER_SHARE))


def _plan(groups: Iterable[_Ranks], server: Parts, num_gpus: int) -> Table:
    """Return the plan of the devices, in GiB, or in MiB where all of it is small."""
    numbers = [Column(name, justify="right") for name in ("each", "all")]
    rows = [(one.who.removeprefix("a "), one.state | one.step, one.count) for one in groups]
    rows.append(("server", server, num_gpus))
    is_small = all(sum(parts.values()) < GIB for _, parts, _ in rows)
    unit = GIB / 1024 if is_small else GIB
    title = f"{'MiB' if is_small else 'GiB'} for sequences of full length"
    table = Table(title, *numbers, box=None, pad_edge=False)
    for name, parts, count in rows:
        for label, size in ({name: sum(parts.values())} | parts).items():
            if size > 0:
                values = (f"{value / unit:,.3f}" for value in (size, size * count))
                table.add_row(label if label == name else f"  {label}", *values, style="bold" if label == name else "")
    return table
