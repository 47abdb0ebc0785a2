"""`arealite devices`: the devices of nodes, and which process of a plan gets which."""

import argparse

from rich.console import Console
from rich.table import Column, Table

from arealite.api.cli_args import BaseExperimentConfig as Config
from arealite.launcher.plan.jobs import samples_in_trainer
from arealite.launcher.plan.plan import Plan
from arealite.utils.devices import Node, this_node

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List GPUs, CPU cores and memory of this node, or of the nodes of a Ray cluster, and what is free. `arealite "
        "check` shows which process of a run gets which device, and whether the memory it needs is free."
    )
    parser.add_argument("--ray", action="store_true", help="the nodes of RAY_ADDRESS, or of this node's cluster")


def run(args: argparse.Namespace) -> int:
    """Print the devices of this node, or of a Ray cluster."""
    console = Console(highlight=False)
    node = None if args.ray else this_node()
    console.print(_cluster() if node is None else _devices_of(node))
    if node is not None and not node.gpus:
        console.print("no GPU: nvidia-smi lists none that this process may use; trainers and lite run on CPU cores")
    return 0


def _devices_of(node: Node) -> Table:
    table = _table("node", "device", "memory", "free")
    table.add_row("this node", f"{node.cores} CPU cores", _gib(node.memory), _gib(node.free))
    for gpu in node.gpus:
        table.add_row("", f"GPU {gpu.index}  {gpu.name}", _gib(gpu.memory), _gib(gpu.free))
    return table


def _cluster() -> Table:
    """Ask Ray for its nodes, which know kinds and numbers of GPUs but not their memory. Raises ConfigError."""
    from arealite.launcher.place.ray import cluster_nodes, connect

    connect()
    table = _table("node", "device", "memory", "free")
    for node in cluster_nodes():
        table.add_row(node["name"], f"{node['CPU']:g} CPU cores", _gib(node["memory"]), "")
        if node["GPU"]:
            table.add_row("", f"{node['GPU']:g} x {node['kind']}", "not told", "")
    return table


def placements(config: Config, plan: Plan, node: Node) -> Table:
    """Return which process runs where; free memory is known of `node` if the run has no other."""
    table = _table("process", "node", "device", "free")
    here = node if plan.num_nodes == 1 else None
    gpus = dict(enumerate(here.gpus)) if here is not None else {}
    for one in plan.placements:
        names = [f"GPU {device}  {gpus[device].name if device in gpus else ''}".rstrip() for device in one.devices]
        free = ", ".join(_gib(gpus[device].free) for device in one.devices if device in gpus)
        free = free or _gib(here.free if here is not None else None)
        samples = ", also samples" if one.index == 0 and one.role == "trainer" and samples_in_trainer(config) else ""
        table.add_row(one.name, str(one.node), (", ".join(names) or "CPU cores") + samples, free)
    for group in plan.groups:
        each = "1 GPU each" if group.num_gpus else "CPU cores"
        table.add_row(f"{group.num_ranks} workers of {group.name}", "Ray chooses", each)
    return table


def _table(*names: str) -> Table:
    columns = [Column(name, justify="right" if name in ("memory", "free") else "left") for name in names]
    return Table(*columns, box=None, pad_edge=False)


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:,.1f} GiB"
