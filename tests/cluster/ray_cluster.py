"""A real Ray cluster on this machine: a head that runs no job, and machines with four GPUs that nobody looks for.

Machines are told apart by name, and all have this machine's address. A machine that was killed is dead for Ray after a
few seconds instead of many.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import psutil
from ray.cluster_utils import Cluster

from arealite.utils.processes import kill_tree

GPUS = 4
CPUS = 32
"""Of a machine; Ray counts them without looking."""
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",  # by default 15: workers would wait for whatever else runs
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
}
_STORE_BYTES = 80 << 20


class RayCluster:
    """Machines that can be added and killed."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "node_name": "head", "object_store_memory": _STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._machines = {}

    @property
    def address(self) -> str:
        """RAY_ADDRESS."""
        return self._cluster.address

    def add(self, *names: str, gpus: int = GPUS) -> None:
        """Add machines and wait until the cluster has them."""
        for name in names:
            self._machines[name] = self._cluster.add_node(
                wait=False, node_name=name, num_cpus=CPUS, num_gpus=gpus, object_store_memory=_STORE_BYTES
            )
        self._cluster.wait_for_nodes(timeout=300)

    def kill(self, name: str) -> None:
        """Kill a machine: all its processes at once, and not only Ray's."""
        machine = self._machines.pop(name)
        (raylet,) = machine.all_processes["raylet"]
        kill_tree(raylet.process.pid)
        self._cluster.remove_node(machine, allow_graceful=False)

    def raylet(self, name: str) -> psutil.Process:
        """Return Ray's own process of a machine."""
        return psutil.Process(self._machines[name].all_processes["raylet"][0].process.pid)

    def machine_of(self, process: psutil.Process) -> str:
        """Return the machine that a process runs on."""
        ancestors = {parent.pid for parent in process.parents()}
        return next(name for name in self._machines if self.raylet(name).pid in ancestors)

    def close(self) -> None:
        self._cluster.shutdown()


@contextlib.contextmanager
def ray_cluster(*names: str) -> Iterator[RayCluster]:
    """Run a cluster with these machines."""
    before = {name: os.environ.get(name) for name in _SETTINGS}
    os.environ.update(_SETTINGS)
    cluster = RayCluster()
    try:
        cluster.add(*names)
        yield cluster
    finally:
        cluster.close()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
