"""The servers of a run, our own and those of others, and the groups of workers of a master: roles, ranks, devices.

The first role that shares with none has its own workers, as has each role with `ranks` or `parallel`; the others share
those of the first. The trained model's role comes first, then the roles follow in the order of the config's class.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass

from arealite.api.alloc_mode import AllocationMode, ParallelSizes
from arealite.api.cli_args import BaseExperimentConfig, RoleConfig, TrainEngineConfig, WorkersConfig
from arealite.api.config.checks import check_parallel
from arealite.api.config.run import RunConfig
from arealite.api.errors import ConfigError, require
from arealite.utils.network import addresses_in
from arealite.utils.processes import SERVER_ADDRS_VARIABLE
from arealite.utils.terminal import listed, nearest


@dataclass(frozen=True)
class Group:
    """Workers that form one world and run their roles in turn."""

    name: str  # of the role whose group it is; its logs are `<name>-<rank>.log`
    roles: tuple[str, ...]
    sizes: ParallelSizes  # of its engines: the ranks of a block compute on the same rows
    strategy: str  # how Ray places them on nodes
    threads: int | None  # of each; None is a share of the cores
    gpus_per_rank: int  # 0 on a CPU cluster

    @property
    def num_ranks(self) -> int:
        return self.sizes.world_size

    @property
    def num_gpus(self) -> int:
        return self.num_ranks * self.gpus_per_rank


def make_layout(config: BaseExperimentConfig, roles: Collection[str] | None = None) -> tuple[Group, ...]:
    """Return the groups of some roles, by default of all roles with a block in the config.

    Raises ConfigError for contradictory blocks, and for more workers than the cluster has devices.
    """
    workers = config.workers or WorkersConfig()
    wishes = _wishes(config, workers, _roles(config, workers) if roles is None else roles)
    first = next(wish.share or role for role, wish in wishes.items())  # it shares with none, as shares form no ring
    given = {role: sizes for role, wish in wishes.items() if (sizes := _given_sizes(role, wish)) is not None}
    own = {role: role if role in given else first for role in wishes}
    owner = {role: own[wish.share or role] for role, wish in wishes.items()}
    mode = config.allocation
    default_sizes = mode.train if mode is not None and mode.train.data else ParallelSizes()
    groups = tuple(
        Group(
            name=name,
            roles=tuple(role for role in wishes if owner[role] == name),
            sizes=given.get(name, default_sizes),
            strategy=wishes[name].strategy,
            threads=wishes[name].threads,
            gpus_per_rank=int(config.cluster.n_gpus_per_node > 0),
        )
        for name in dict.fromkeys(owner.values())
    )
    for role, wish in wishes.items():
        of_engine = getattr(getattr(config, role, None), "parallel", "")
        change = f"Set workers.{role}.parallel."
        require(not of_engine, f"{role}.parallel must be left out with workers: got {of_engine}. {change}")
        if isinstance(engine := getattr(config, role, None), TrainEngineConfig):
            sizes, place = next((one.sizes, one.name) for one in groups if role in one.roles)
            check_parallel(engine, role, sizes, given_by=f"workers.{place}.parallel")
        own_keys = ("ranks", "parallel", "threads", "strategy")
        said = [key for key in own_keys if getattr(wish, key) != getattr(RoleConfig(), key)]
        require(
            owner[role] == role or not said,
            f"workers.{role} must not have {listed(said)}, as its workers are those of {owner[role]}: got "
            f"{listed(str(getattr(wish, key)) for key in said)}. Remove this, or give {role} ranks and no share.",
        )
    _check_devices(config, groups)
    return groups


def _given_sizes(role: str, wish: RoleConfig) -> ParallelSizes | None:
    """Return the sizes that the block of a role gives, None if it gives none."""
    if not wish.parallel:
        return None if wish.ranks is None else ParallelSizes(data=wish.ranks)
    try:
        sizes = ParallelSizes.from_str(wish.parallel)
    except ConfigError as error:
        change = "Write one or more of d<N>, p<N>, t<N>, c<N> and e<N>; e divides d x c x t and is a multiple of t."
        raise ConfigError(
            f"workers.{role}.parallel must be sizes such as d2t2: got {wish.parallel}. {change}"
        ) from error
    require(
        wish.ranks in (None, sizes.world_size),
        f"workers.{role}.ranks must be those of workers.{role}.parallel, {sizes.world_size} of {wish.parallel}: got "
        f"{wish.ranks}. Remove one of the two.",
    )
    return sizes


def _roles(config: BaseExperimentConfig, workers: WorkersConfig) -> list[str]:
    """Return the roles with a block in the config, and those that only `workers` names, for a script's own class."""
    known = _by_role(workers)
    there = [role for role in known if getattr(config, role, None) is not None]
    said = [role for role, wish in known.items() if wish != RoleConfig() and role not in there]
    require(
        not said or isinstance(config, RunConfig),
        f"workers must name roles of the experiment, {listed(there)}: got "
        f"{listed(said)}. Remove this, or add a block of this name to the config.",
    )
    return [*there, *said]


def _by_role(workers: WorkersConfig) -> dict[str, RoleConfig]:
    return {role: wish for role, wish in vars(workers).items() if isinstance(wish, RoleConfig)}


def _wishes(config: BaseExperimentConfig, workers: WorkersConfig, roles: Collection[str]) -> dict[str, RoleConfig]:
    """Return the block of each role, the trained one first, and check their shares."""
    known = _by_role(workers)
    for role in roles:
        change = "Rename it, or add it to the class of workers."
        require(role in known, f"a role must be one that workers has, {listed(known)}: got {role}. {change}")
    trained, _ = config.trained
    wishes = {role: known[role] for role in sorted(known, key=lambda role: role != trained) if role in roles}
    for role, wish in wishes.items():
        if wish.share is None:
            continue
        change = nearest(wish.share, wishes)
        require(wish.share in wishes, f"workers.{role}.share must be a role with an engine: got {wish.share}. {change}")
        other = wishes[wish.share].share
        require(
            other is None,
            f"workers.{role}.share must be a role with workers of its own: got {wish.share}, which shares those of "
            f"{other}. Remove one of the two.",
        )
    return wishes


def _check_devices(config: BaseExperimentConfig, groups: tuple[Group, ...]) -> None:
    """Check that all workers have a device beside the servers, and each group the nodes of its strategy."""
    mode, cluster = config.allocation, config.cluster
    num_serving = 0 if mode is None else num_own_servers(config, mode) * mode.gen_instance_size
    workers = listed(f"{group.num_ranks} of {group.name}" for group in groups)
    require(
        cluster.n_gpus_per_node == 0
        or sum(group.num_gpus for group in groups) + num_serving <= cluster.n_nodes * cluster.n_gpus_per_node,
        f"workers must fit the cluster: got {workers} beside {num_serving} GPUs of servers, and {cluster.n_nodes} x "
        f"{cluster.n_gpus_per_node} GPUs. Lower workers.<role>.ranks, or let a role share the workers of another.",
    )
    for group in groups:
        require(
            group.strategy != "STRICT_PACK" or group.num_gpus <= cluster.n_gpus_per_node,
            f"workers.{group.name} must fit into one node with STRICT_PACK: got {group.num_ranks} ranks, and "
            f"{cluster.n_gpus_per_node} GPUs per node. Use PACK, or lower workers.{group.name}.ranks.",
        )
        require(
            group.strategy != "STRICT_SPREAD" or group.num_ranks <= cluster.n_nodes,
            f"workers.{group.name} must have a node for each rank with STRICT_SPREAD: got {group.num_ranks} ranks and "
            f"{cluster.n_nodes} nodes. Use SPREAD, or lower workers.{group.name}.ranks.",
        )


def foreign_servers(config: BaseExperimentConfig) -> list[str]:
    """Return the addresses of servers that this run neither starts nor stops."""
    if config.rollout is None:
        return []
    try:
        return config.rollout.server_addrs or addresses_in(os.environ.get(SERVER_ADDRS_VARIABLE, ""))
    except ValueError as error:
        raise ConfigError(f"{SERVER_ADDRS_VARIABLE} must name servers: {error}") from error


def num_own_servers(config: BaseExperimentConfig, mode: AllocationMode) -> int:
    """Return the number of servers that the launcher starts."""
    if (mode.takes_turns or mode.is_colocated) and foreign_servers(config):
        raise ConfigError(
            f"{SERVER_ADDRS_VARIABLE} must be empty with allocation_mode={mode}, whose servers are ours: got "
            f"{', '.join(foreign_servers(config))}. Unset it, or write '+' in allocation_mode."
        )
    if config.rollout is None:
        if mode.gen_dp_size > 0:
            raise ConfigError(
                f"allocation_mode must name trainers only for an experiment without servers, such as supervised "
                f"fine-tuning: got {mode}. Write allocation_mode={mode.train}."
            )
        return 0
    if foreign_servers(config) or config.rollout.replay_from or mode.is_colocated:
        return 0
    if mode.gen_dp_size == 0:
        raise ConfigError(
            f"allocation_mode must name servers for reinforcement learning: got {mode}. "
            f"Write e.g. lite.d1+{mode}, or give rollout.server_addrs."
        )
    has_one_gpu = not config.server_kind.gpus_flag
    if mode.gen_pp_size > 1 or (has_one_gpu and mode.gen_tp_size > 1):
        limits = "p1t1" if has_one_gpu else "p1"
        raise ConfigError(f"servers of {mode.gen_backend} must have {limits} in allocation_mode: got {mode.gen}.")
    return mode.gen_dp_size
