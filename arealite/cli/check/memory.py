"""The memory plan of a run, compared with the GPUs of this node or, on the CPU, the host's memory; models without their
weights."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table
from transformers import PreTrainedModel

from arealite.api.alloc_mode import AllocationMode, ParallelSizes
from arealite.api.cli_args import BaseExperimentConfig as Config
from arealite.api.errors import ConfigError
from arealite.cli.check.findings import Findings
from arealite.engine.hf_model import build_meta_model
from arealite.engine.load_balancing import check_balanced
from arealite.engine.lora import add_adapters
from arealite.engine.packed_attention import pick_attention
from arealite.engine.parallel.layers import check_sizes
from arealite.launcher.plan.jobs import mesh_lines
from arealite.launcher.plan.plan import make_plan
from arealite.planner.memory import GIB, ModelShape, model_shape
from arealite.planner.needs import Needs, block_of, longest_sequence, needs_of, positions_of, roles_beside
from arealite.utils.devices import Node

_FREE = 0.85  # of a GPU: below it others use it


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
            if gpu.free < _FREE * gpu.memory:
                text = f"GPU {gpu.index} has {gpu.free / GIB:.1f} of {gpu.memory / GIB:.1f} GiB free"
                findings.add(
                    "warning", text, "End what uses it (nvidia-smi), or choose others by CUDA_VISIBLE_DEVICES."
                )
        longest = longest_sequence(config, positions_of(model), longest_prompt)
        needs = needs_of(config, model_shape(model), longest, shapes_beside(config, model))
        for verdict in needs.verdicts(min((gpu.memory for gpu in gpus), default=None), node.memory):
            findings.add(*verdict)
        if not findings.is_brief:
            train = AllocationMode.from_str(config.allocation_mode).train
            mesh = mesh_lines(train) if config.workers is None else []
            findings.console.print("", memory_table(needs), "", *mesh, sep="\n", markup=False)


def memory_table(needs: Needs) -> Table:
    """Return the plan of the devices, in GiB, or in MiB where all of it is small."""
    numbers = [Column(name, justify="right") for name in ("each", "all")]
    rows = [(one.who.removeprefix("a "), one.state | one.step, one.count) for one in needs.ranks]
    rows.append(("server", needs.server, needs.mode.gen.world_size))
    is_small = all(sum(parts.values()) < GIB for _, parts, _ in rows)
    unit = GIB / 1024 if is_small else GIB
    title = f"{'MiB' if is_small else 'GiB'} for sequences of full length"
    table = Table(title, *numbers, box=None, pad_edge=False)
    for name, parts, count in rows:
        for label, size in ({name: sum(parts.values())} | parts).items():
            if size > 0:
                values = (f"{value / unit:,.3f}" for value in (size, size * count))
                style = "bold" if label == name else ""
                table.add_row(label if label == name else f"  {label}", *values, style=style)
    return table


def shapes_beside(config: Config, model: PreTrainedModel) -> dict[str, ModelShape]:
    """Return the shapes of roles whose model is not the trained one."""
    attention, own = model.config._attn_implementation, config.trained[1].path
    paths = {role: path for role in roles_beside(config) if (path := _path(config, role)) not in (None, own)}
    return {role: model_shape(_divisible(config, role, path, attention)) for role, path in paths.items()}


def _divisible(config: Config, role: str, path: str, attention: str) -> PreTrainedModel:
    """Build the model of a role without its weights; its ranks must be able to divide it."""
    model = build_meta_model(path, attention)
    check_sizes(model, ParallelSizes.from_str(block_of(config, role).parallel or "d1"))
    return model


def _path(config: Config, role: str) -> str | None:
    block: Any = getattr(config, role, None)
    return block.get("path") if isinstance(block, dict) else getattr(block, "path", None)


def load_model(config: Config) -> PreTrainedModel:
    """Return the trained model without its weights; ranks must be able to divide it."""
    key, block = config.trained
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention, _ = pick_attention(block.attn_impl, device, getattr(torch, block.dtype))
    try:
        model = build_meta_model(block.path, attention, has_value_head=block.HAS_VALUE_HEAD)
    except OSError as error:
        if Path(block.path).is_dir():
            raise
        raise ValueError(
            f"{key}.path must be a folder, or a model of the hub that is downloaded or can be: got {block.path}. "
            f"Correct it, or look at the connection ({' '.join(str(error).split()).partition('. ')[0]})."
        ) from error
    check_sizes(model, ParallelSizes.from_str(block.parallel or "d1"))
    check_balanced(model, block)
    if block.lora is not None:
        add_adapters(model, block)
    return model


def divider(model: PreTrainedModel) -> Callable[[ParallelSizes], bool]:
    """Return a function that says whether ranks can divide a model so."""

    @functools.cache
    def divides(**sizes: int) -> bool:
        try:
            check_sizes(model, ParallelSizes(**sizes))
        except ConfigError:
            return False
        return True

    def can_divide(sizes: ParallelSizes) -> bool:
        t, c, p, e = sizes.tensor, sizes.context, sizes.pipeline, sizes.expert  # each by itself, as it takes a while
        return divides(tensor=t, context=c) and divides(pipeline=p) and (e == 1 or divides(data=e, tensor=t, expert=e))

    return can_divide
