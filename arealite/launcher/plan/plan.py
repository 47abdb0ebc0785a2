"""The plan of a run, from the config alone: which process runs on which node with which devices.

Servers fill the nodes first, one behind the other, and none is spread over two nodes; the ranks of the trainer
follow, or have the same devices. Every launcher places the same plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from arealite.api.cli_args import BaseExperimentConfig, LauncherConfig
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.inference.backends.program import ServerProgram
from arealite.launcher.plan.layout import Group, make_layout, num_own_servers


@dataclass(frozen=True)
class Placement:
    """One job of the plan: a server, or a rank of the trainer."""

    name: str  # `server-<i>` or `trainer-<rank>`
    role: Literal["server", "trainer"]
    node: int  # number of its node
    devices: tuple[int, ...]  # its GPUs on that node; none on a CPU cluster
    index: int  # number of the server, or the rank


@dataclass(frozen=True)
class Plan:
    """All jobs of a run."""

    num_nodes: int
    gpus_per_node: int  # 0 on a CPU cluster
    placements: tuple[Placement, ...]
    groups: tuple[Group, ...] = ()  # of workers, which a master starts itself
    takes_turns: bool = False  # whether servers have the GPUs of ranks, and sleep while these compute

    @property
    def servers(self) -> tuple[Placement, ...]:
        return tuple(one for one in self.placements if one.role == "server")

    @property
    def trainers(self) -> tuple[Placement, ...]:
        return tuple(one for one in self.placements if one.role == "trainer")

    @property
    def num_workers(self) -> int:
        return sum(group.num_ranks for group in self.groups)

    @property
    def num_gpus(self) -> int:
        """GPUs that jobs use, servers and ranks perhaps the same."""
        used = {(one.node, device) for one in self.placements for device in one.devices}
        return len(used) + sum(group.num_gpus for group in self.groups)

    @property
    def used_nodes(self) -> list[int]:
        return sorted({one.node for one in self.placements})

    @property
    def trainer_nodes(self) -> tuple[int, ...]:
        """The nodes that have ranks, in the order of the ranks."""
        return tuple(dict.fromkeys(one.node for one in self.trainers))

    def ranks_on(self, node: int) -> tuple[Placement, ...]:
        """Return the ranks of a node, by local rank."""
        return tuple(one for one in self.trainers if one.node == node)


@dataclass(frozen=True)
class Run:
    """A checked command line; the checks that need a node of the run are still to come."""

    config: BaseExperimentConfig
    plan: Plan
    entry: Path
    argv: Sequence[str]  # `--config FILE key=value ...`, as the script gets it

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.config)


def entry_script(entry: str | Path) -> Path:
    """Return the absolute path of the script, which must be a file."""
    path = Path(entry)
    if not path.is_file():
        raise ConfigError(f"the entry script must be a file: got {entry}, which does not exist. Correct its path.")
    return path.resolve()


def checked_plan(config: BaseExperimentConfig) -> Plan:
    """Check the model and the flags of the servers as well, and return the plan."""
    plan = make_plan(config)
    check_model(config)
    key, block = config.trained
    is_inside = Path(block.path).expanduser().absolute().is_relative_to(RunFolder(config).path.absolute())
    if trains(config) and is_inside:
        raise ConfigError(
            f"{key}.path must lie outside of the folder of the run: got {block.path}, and a new run moves aside what "
            "is there from an earlier one. Choose another trial_name."
        )
    if plan.servers:
        ServerProgram(config).check_block()
    return plan


def refuse_workers(plan: Plan, *, launcher: str) -> None:
    """Refuse a run with a master for a launcher without Ray."""
    if plan.groups:
        raise ConfigError(
            f"workers must be started by the local or the Ray launcher: got {launcher}. Run `ray start` on the nodes "
            "and use arealite.launcher.ray, or remove workers for a script of ranks."
        )


def check_model(config: BaseExperimentConfig) -> None:
    """Refuse a folder that does not exist."""
    key, block = config.trained
    path = block.path
    if path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().is_dir():
        raise ConfigError(f"{key}.path must be a folder or a hub id: got {path}, which does not exist. Correct it.")


def trains(config: BaseExperimentConfig) -> bool:
    """Return whether a run trains; others only serve or evaluate."""
    mode = config.allocation
    return mode is not None and not mode.is_evaluation and mode.train_world_size > 0


def make_plan(config: BaseExperimentConfig) -> Plan:
    """Return the processes of a run. Raises ConfigError for a config without a valid plan."""
    mode, cluster = config.allocation, config.cluster
    if mode is None:
        raise ConfigError(
            "allocation_mode must be given to a launcher: got nothing. "
            "Add e.g. allocation_mode=lite.d1p1t1+d1p1t1 (servers and trainers) or allocation_mode=d1 (trainers only)."
        )
    num_servers = num_own_servers(config, mode)
    is_evaluation = mode.is_evaluation
    groups = make_layout(config) if config.workers is not None and trains(config) else ()
    has_one_rank = is_evaluation or bool(groups)  # it has no device, as servers and workers compute for it
    num_ranks = 1 if has_one_rank else mode.train_world_size
    if cluster.n_gpus_per_node == 0:
        per_node = -(-(num_servers + num_ranks) // cluster.n_nodes)  # processes stand for GPUs
        placements = [replace(one, devices=()) for one in _place(num_servers, 1, num_ranks, per_node)]
    else:
        if num_servers > 0 and mode.gen_instance_size > cluster.n_gpus_per_node:
            raise ConfigError(
                f"a server must fit into one node: got {mode.gen}, whose servers have {mode.gen_instance_size} GPUs, "
                f"and cluster.n_gpus_per_node={cluster.n_gpus_per_node}. Use a smaller t in allocation_mode."
            )
        is_shared, size = mode.takes_turns, mode.gen_instance_size
        placements = _place(num_servers, size, num_ranks, cluster.n_gpus_per_node, is_shared=is_shared)
        if has_one_rank:
            placements = [one if one.role == "server" else replace(one, node=0, devices=()) for one in placements]
    last_node = max((one.node for one in placements), default=0)
    if last_node >= cluster.n_nodes:
        raise ConfigError(
            f"allocation_mode must fit the cluster: got {mode}, which needs {last_node + 1} nodes with "
            f"{cluster.n_gpus_per_node} GPUs as no server is spread over two, and cluster.n_nodes={cluster.n_nodes}. "
            "Make it smaller, or raise cluster.n_nodes or cluster.n_gpus_per_node (0 is a CPU cluster)."
        )
    takes_turns = mode.takes_turns and num_servers > 0  # a replay has none
    return Plan(cluster.n_nodes, cluster.n_gpus_per_node, tuple(placements), groups, takes_turns)


def setup_timeout_s(config: BaseExperimentConfig) -> float:
    """Return the timeout of nodes to come and of servers to be ready."""
    return config.rollout.setup_timeout if config.rollout is not None else 600.0  # fine-tuning loads its model


def cpus_and_mebibytes(config: LauncherConfig, placement: Placement) -> tuple[int, int]:
    """Return the CPUs and the memory that a job reserves; without GPUs, it counts as one."""
    number = len(placement.devices) or 1
    if placement.role == "server":
        return number * config.inference_server_cpus_per_gpu, number * config.inference_server_mem_per_gpu
    return number * config.trainer_cpus_per_gpu, number * config.trainer_mem_per_gpu


def _place(num_servers: int, size: int, num_ranks: int, per_node: int, *, is_shared: bool = False) -> list[Placement]:
    """Fill nodes with servers of `size` devices, then with ranks of one, or begin with both at the first device."""
    placements = []
    next_device = 0  # counted through all nodes
    for index in range(num_servers):
        if next_device % per_node + size > per_node:
            next_device += per_node - next_device % per_node
        node, first = divmod(next_device, per_node)
        devices = tuple(range(first, first + size))
        placements.append(Placement(f"server-{index}", "server", node, devices, index))
        next_device += size
    for rank in range(num_ranks):
        node, device = divmod(rank if is_shared else next_device + rank, per_node)
        placements.append(Placement(f"trainer-{rank}", "trainer", node, (device,), rank))
    return placements
