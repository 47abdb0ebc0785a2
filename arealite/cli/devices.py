"""`arealite devices`: what nodes have, what a config puts where, and whether its memory fits into what is free."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from arealite.api.cli_args import BaseExperimentConfig as Config
from arealite.api.config.run import load_run_config
from arealite.launcher.plan.jobs import samples_in_trainer
from arealite.launcher.plan.plan import Plan, checked_plan
from arealite.utils.devices import Gpu, Node, this_node

GIB = 2**30


def devices(config_file: str | None, overrides: Sequence[str], *, of_ray: bool) -> int:
    """Print the devices of this node, or of a Ray cluster, and the plan of a config; return 1 if it does not fit."""
    console = Console(highlight=False)
    if of_ray:
        gpus, table = [], _cluster()
    else:
        node = this_node()
        gpus, table = list(node.gpus), _devices_of(node)
    console.print(table)
    if not of_ray and not gpus:
        console.print("no GPU: nvidia-smi lists none that this process may use; trainers and lite run on CPU cores")
    if config_file is None:
        return 0
    config = load_run_config(["--config", config_file, *overrides])
    plan = checked_plan(config)
    console.print("", _placements(config, plan, gpus))
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
    table = _table("node", "device", "memory", "free")
    table.add_row("this node", f"{node.cores} CPU cores", *_gib(node.memory, node.free))
    for gpu in node.gpus:
        table.add_row("", f"GPU {gpu.index}  {gpu.name}", *_gib(gpu.memory, gpu.free))
    return table


def _cluster() -> Table:
    """Ask Ray for its nodes, which know kinds and numbers of GPUs but not their memory. Raises ConfigError."""
    from arealite.launcher.place.ray import cluster_nodes, connect

    connect()
    table = _table("node", "device", "memory", "free")
    for node in cluster_nodes():
        table.add_row(node["name"], f"{node['CPU']:g} CPU cores", *_gib(node["memory"], None))
        if node["GPU"]:
            table.add_row("", f"{node['GPU']:g} x {node['kind']}", "not told", "")
    return table


def _placements(config: Config, plan: Plan, gpus: Sequence[Gpu]) -> Table:
    """Return which process runs where."""
    table = _table("process", "node", "device")
    for one in plan.placements:
        names = [gpus[device].name if device < len(gpus) and plan.num_nodes == 1 else "" for device in one.devices]
        shown = ", ".join(f"GPU {device}  {name}".rstrip() for device, name in zip(one.devices, names, strict=True))
        also = ", also samples" if one.index == 0 and one.role == "trainer" and samples_in_trainer(config) else ""
        table.add_row(one.name, str(one.node), (shown or "CPU cores") + also)
    for group in plan.groups:
        each = "1 GPU each" if group.num_gpus else "CPU cores"
        table.add_row(f"{group.num_ranks} workers of {group.name}", "Ray chooses", each)
    return table


def _table(*names: str) -> Table:
    columns = [Column(name, justify="right" if name in ("memory", "free") else "left") for name in names]
    return Table(*columns, box=None, pad_edge=False)


def _gib(*sizes: int | float | None) -> tuple[str, ...]:
    return tuple("" if size is None else f"{size / GIB:,.1f} GiB" for size in sizes)
