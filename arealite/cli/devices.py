"""`arealite devices`: what nodes have, what a config puts where, and whether its memory fits into what is free."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from arealite.api.cli_args import BaseExperimentConfig as Config
from arealite.api.config.run import load_run_config
from arealite.cli.check.devices import device_table, in_gib, placements
from arealite.launcher.plan.plan import Plan, checked_plan
from arealite.utils.devices import Node, this_node


def devices(config_file: str | None, overrides: Sequence[str], *, of_ray: bool) -> int:
    """Print the devices of this node, or of a Ray cluster, and the plan of a config; return 1 if it does not fit."""
    console = Console(highlight=False)
    node = None if of_ray else this_node()
    console.print(_cluster() if node is None else _devices_of(node))
    if node is not None and not node.gpus:
        console.print("no GPU: nvidia-smi lists none that this process may use; trainers and lite run on CPU cores")
    if config_file is None:
        return 0
    config = load_run_config(["--config", config_file, *overrides])
    plan = checked_plan(config)
    console.print("", placements(config, plan, node))
    return _check(config, plan, of_ray=of_ray)


def _check(config: Config, plan: Plan, *, of_ray: bool) -> int:
    """Hold the plan against the devices; the model is built without weights."""
    from arealite.cli.check.findings import Findings
    from arealite.cli.check.memory import check_memory
    from arealite.cli.check.model import check_model
    from arealite.launcher.place.local import LocalPlace

    found = Findings()
    if not of_ray and plan.num_nodes == 1:
        found.look("processes", lambda _: LocalPlace().check(config, plan))
    model = found.look("model", check_model, config)
    if model is not None:
        found.look("memory", check_memory, config, model, config.train_dataset.max_length or 0)
    return 1 if found.summarize() else 0


def _devices_of(node: Node) -> Table:
    table = device_table("node", "device", "memory", "free")
    table.add_row("this node", f"{node.cores} CPU cores", *in_gib(node.memory, node.free))
    for gpu in node.gpus:
        table.add_row("", f"GPU {gpu.index}  {gpu.name}", *in_gib(gpu.memory, gpu.free))
    return table


def _cluster() -> Table:
    """Ask Ray for its nodes, which know kinds and numbers of GPUs but not their memory. Raises ConfigError."""
    from arealite.launcher.place.ray import cluster_nodes, connect

    connect()
    table = device_table("node", "device", "memory", "free")
    for node in cluster_nodes():
        table.add_row(node["name"], f"{node['CPU']:g} CPU cores", *in_gib(node["memory"], None))
        if node["GPU"]:
            table.add_row("", f"{node['GPU']:g} x {node['kind']}", "not told", "")
    return table
