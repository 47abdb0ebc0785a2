"""`arealite devices`: the devices of this node, or of the nodes of a Ray cluster."""

import argparse
from collections.abc import Iterator

from rich.console import Console
from rich.table import Column, Table

from arealite.utils.devices import this_node

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List GPUs, CPU cores and memory of this node, or of the nodes of a Ray cluster, and what is free. The option "
        "--dry-run of a launcher shows which process of a run gets which device."
    )
    parser.add_argument("--ray", action="store_true", help="the nodes of RAY_ADDRESS, or of this node's cluster")


def run(args: argparse.Namespace) -> int:
    """Print the devices of this node, or of a Ray cluster."""
    sizes = [Column(name, justify="right") for name in ("memory", "free")]
    table = Table("node", "device", *sizes, box=None, pad_edge=False)
    for row in _of_cluster() if args.ray else _of_this_node():
        table.add_row(*row)
    Console(highlight=False).print(table)
    return 0


def _of_this_node() -> Iterator[tuple[str, ...]]:
    node = this_node()
    yield "this node", f"{node.cores} CPU cores", _gib(node.memory), _gib(node.free)
    for gpu in node.gpus:
        yield "", f"GPU {gpu.index}  {gpu.name}", _gib(gpu.memory), _gib(gpu.free)
    if not node.gpus:
        yield "", "no GPU that nvidia-smi lists and this process may use"


def _of_cluster() -> Iterator[tuple[str, ...]]:
    """Ask Ray for its nodes, which know kinds and numbers of GPUs but not their memory. Raises ConfigError."""
    from arealite.launcher.place.ray import cluster_nodes, connect

    connect()
    for node in cluster_nodes():
        yield node["name"], f"{node['CPU']:g} CPU cores", _gib(node["memory"])
        if node["GPU"]:
            yield "", f"{node['GPU']:g} x {node['kind']}", "not told"


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB"
