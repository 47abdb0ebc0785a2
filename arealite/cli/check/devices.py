"""Which process runs on which node and device, and what is free there: a table of `arealite devices` and `check`."""

from rich.table import Column, Table

from arealite.api.cli_args import BaseExperimentConfig as Config
from arealite.launcher.plan.jobs import samples_in_trainer
from arealite.launcher.plan.plan import Plan
from arealite.utils.devices import Node

GIB = 2**30


def placements(config: Config, plan: Plan, node: Node | None) -> Table:
    """Return which process runs where; what is free is known of `node`, if it is the only one."""
    table = device_table("process", "node", "device", "free")
    here = node if plan.num_nodes == 1 else None
    gpus = here.gpus if here is not None else ()
    for one in plan.placements:
        known = [gpus[device] if device < len(gpus) else None for device in one.devices]
        shown = [
            f"GPU {device}  {gpu.name if gpu else ''}".rstrip() for device, gpu in zip(one.devices, known, strict=True)
        ]
        free = [*in_gib(*(gpu.free if gpu else None for gpu in known))] or [*in_gib(here.free if here else None)]
        also = ", also samples" if one.index == 0 and one.role == "trainer" and samples_in_trainer(config) else ""
        table.add_row(one.name, str(one.node), (", ".join(shown) or "CPU cores") + also, ", ".join(filter(None, free)))
    for group in plan.groups:
        each = "1 GPU each" if group.num_gpus else "CPU cores"
        table.add_row(f"{group.num_ranks} workers of {group.name}", "Ray chooses", each)
    return table


def device_table(*names: str) -> Table:
    columns = [Column(name, justify="right" if name in ("memory", "free") else "left") for name in names]
    return Table(*columns, box=None, pad_edge=False)


def in_gib(*sizes: int | float | None) -> tuple[str, ...]:
    return tuple("" if size is None else f"{size / GIB:,.1f} GiB" for size in sizes)
