"""Slots on a Ray cluster: a bundle of resources for each node of the plan, and in it an actor for each job.

Ray decides which node a bundle is on, and finds another one when that node dies. An actor keeps the CPUs, GPUs and
memory of its job and carries bytes between the job's relay and the launcher. Ray's own transport is trusted.
"""

import asyncio
import contextlib
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.inference.backends.program import ServerProgram
from arealite.launcher.place.base import NodeLostError
from arealite.launcher.place.local import READ_BYTES
from arealite.launcher.place.relay import RelayPlace, RelaySlot
from arealite.launcher.plan.plan import Placement, Plan, cpus_and_mebibytes
from arealite.utils.devices import visible_gpus
from arealite.utils.secret import ensure_secret

with contextlib.suppress(ModuleNotFoundError):  # a plan is made without Ray; `connect` reports its absence
    import ray
    from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_CONNECT_S = 10.0
_RETRY_S = 1.0
_CLOSE_S = 10.0  # for a job's processes and its relay to end after they were asked to
_FORWARDED = re.compile(
    r"(AREAL|HF_|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|WANDB|SWANLAB|TRACKIO|NCCL|GLOO|TORCH|PYTORCH|TRITON|SGL|VLLM|PYTHON)"
    r"[A-Z0-9_]*|(?i:(http|https|no)_proxy)"
)
"""Variables of the launcher that jobs get; others are those of the node."""


def connect() -> None:
    """Connect this process to the cluster of RAY_ADDRESS, or else to the one this node belongs to."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray must be installed here: it is not. Run `pip install 'arealite[ray]'` on every node.")
    address = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if address != "auto":  # Ray itself would try for a quarter of an hour
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"a Ray cluster must be running: got {last_line(error)} for RAY_ADDRESS={address}. "
            "Run `ray start` on its nodes, and set RAY_ADDRESS to host:port of its head unless this is one of them; "
            "set RAY_AUTH_MODE=token if the cluster asks for a token."
        ) from error


class Worker:
    """The actor: owns one relay on its node."""

    async def start(self, env: dict[str, str], folder: str, toward: str, watchdog_s: float) -> str:
        """Start the relay as from the launcher's folder, and return the node's name."""
        relay = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "arealite.launcher.place.relay", "--toward", toward, "--watchdog", str(watchdog_s)],
            env=os.environ | env | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, ray.get_gpu_ids()))},
            cwd=folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert relay.stdin is not None and relay.stdout is not None
        self._relay, self._input, self._output = relay, relay.stdin, relay.stdout
        node_id = ray.get_runtime_context().get_node_id()
        return next(node["NodeName"] for node in ray.nodes() if node["NodeID"] == node_id)

    async def read(self) -> bytes:
        """Return what the relay writes next, nothing at its end."""
        return await self._output.read(READ_BYTES)

    async def write(self, data: bytes) -> None:
        """Write to the relay."""
        self._input.write(data)

    async def end(self) -> None:
        """End the relay and its job, and wait until they have ended."""
        self._input.close()
        await self._relay.wait()


class RaySlot(RelaySlot):
    """A slot that an actor keeps."""

    def __init__(self, node: str, actor: Any, *, timeout_s: float) -> None:
        super().__init__(node, self._read, actor.write.remote, actor.end.remote, timeout_s=timeout_s)
        self._actor = actor

    async def close(self) -> None:
        """Wait until the relay has ended the job and itself, and give its resources back."""
        with contextlib.suppress(RayError, TimeoutError):  # its node is gone
            async with asyncio.timeout(_CLOSE_S):
                await self._actor.end.remote()
        await asyncio.to_thread(ray.kill, self._actor)

    async def _read(self) -> bytes:
        try:
            return bytes(await self._actor.read.remote())
        except RayError as error:
            why = "its actor can't be reached" if isinstance(error, ActorUnavailableError) else last_line(error)
            raise NodeLostError(f"{self.node} is lost: {why}") from error


class RayPlace(RelayPlace):
    """The part of a Ray cluster that a run has."""

    _ADVICE = (
        "Add nodes, wait for others to finish, or lower allocation_mode or launcher.*_cpus_per_gpu and *_mem_per_gpu."
    )
    _group: Any = None

    def check(self, config: BaseExperimentConfig, plan: Plan) -> None:
        """Connect to the cluster. A slot waits for room."""
        if plan.servers:
            ServerProgram(config).check_installed()
        connect()

    def registry_host(self, plan: Plan) -> str:
        return str(ray.util.get_node_ip_address())

    def open(self, config: BaseExperimentConfig, plan: Plan, log: Callable[[str], None]) -> None:
        super().open(config, plan, log)
        self._actor_class = ray.remote(Worker)
        self._nodes = sorted({placement.node for placement in plan.placements})
        bundles = [_sum(self._needs(one) for one in plan.placements if one.node == node) for node in self._nodes]
        self._group = placement_group(bundles, strategy="SPREAD")

    async def close(self) -> None:
        """Give everything back, which ends all remaining actors."""
        if self._group is not None:
            await asyncio.to_thread(remove_placement_group, self._group)
        self._group = None

    async def _take(self, placement: Placement) -> RaySlot:
        """Wait for an actor that could start its relay; when its node dies meanwhile, for another one."""
        needs = self._needs(placement)
        options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "memory": needs.get("memory")}
        bundle = PlacementGroupSchedulingStrategy(self._group, self._nodes.index(placement.node))
        while True:
            actor = self._actor_class.options(**options, scheduling_strategy=bundle).remote()
            try:
                where = os.getcwd(), ray.util.get_node_ip_address()
                node = await actor.start.remote(forwarded_environment(), *where, self._config.node_timeout)
                slot = RaySlot(node, actor, timeout_s=self._config.node_timeout)
                await slot.meet()
                return slot
            except BaseException as error:
                await asyncio.to_thread(ray.kill, actor)
                if isinstance(error, RayTaskError) or getattr(error, "actor_init_failed", False):
                    raise ConfigError(
                        f"every node must be like this one: got {last_line(error)} when {placement.name} was to "
                        f"start. It must have Python, arealite and {os.getcwd()} at the same paths."
                    ) from error
                if not isinstance(error, RayActorError):
                    raise
                self._log(f"{placement.name} is placed again, because its node failed: {last_line(error)}")
            await asyncio.sleep(_RETRY_S)

    def _needs(self, placement: Placement) -> dict[str, float]:
        cpus, mebibytes = cpus_and_mebibytes(self._config, placement)
        needs = {"CPU": cpus, "GPU": len(placement.devices), "memory": mebibytes << 20}
        return {name: float(amount) for name, amount in needs.items() if amount}

    def _describe(self, missing: Sequence[Placement]) -> str:
        names = ", ".join(one.name for one in missing)
        needed = _sum(self._needs(one) for one in missing)
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        free = ray.available_resources()
        has = [f"{free.get(name, 0):g} of {_sum(alive).get(name, 0):g} {name} free" for name in needed]
        needs = ", ".join(f"{amount:g} {name}" for name, amount in needed.items())
        return f"Ray to place {names} with {needs}; the cluster has {len(alive)} nodes with {', '.join(has)}"


def forwarded_environment() -> dict[str, str]:
    """Return what jobs get of the launcher's environment, and the cluster it is connected to."""
    ours = {name: value for name, value in os.environ.items() if _FORWARDED.fullmatch(name)}
    return ours | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    return dict(sum((Counter(part) for part in parts), Counter()))


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text, where Ray has the cause."""
    return str(error).strip().rpartition("\n")[2].strip()


@contextlib.contextmanager
def own_ray(run: RunFolder, num_gpus: int) -> Iterator[None]:
    """Run a private single-node Ray for the workers of a master outside a cluster; the block must shut it down.

    It listens on all interfaces and runs what it is sent, for clients that know the run's secret. The folder of its
    logs and sockets, whose paths must be short, is the same for every master of a run, of which there is one at a time.
    """
    run.path.mkdir(parents=True, exist_ok=True)
    ensure_secret(run.path)
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(run.secret)
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()  # of another run in this process
    name = f"arealite-ray-{hashlib.blake2b(str(run.path.resolve()).encode(), digest_size=6).hexdigest()}"
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), name)
    shutil.rmtree(folder, ignore_errors=True)  # of a master that was killed
    folder.mkdir(mode=0o700)
    try:
        _start_ray(num_gpus, str(folder))
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start_ray(num_gpus: int, folder: str) -> None:
    """Start Ray on this node, for the workers of this process, which from then on leaves the GPUs to them."""
    gpus = visible_gpus() if num_gpus else []
    if len(gpus) < num_gpus:
        raise ConfigError(
            f"this node must have a GPU for each worker: got {len(gpus)} and {num_gpus} workers. Lower "
            "workers.<role>.ranks, or set cluster.n_gpus_per_node=0 to run on the CPU."
        )
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[:num_gpus])
    # No usage reports to the makers of Ray, no workers without our variables, and none that yield to other processes.
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_prestart_worker_first_driver", "RAY_worker_niceness"):
        os.environ.setdefault(name, "0")
    ray.init(
        address="local",  # never a cluster that already runs on this node
        num_cpus=max(64, os.cpu_count() or 1),
        num_gpus=num_gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=folder,
    )
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if (mode := os.environ.get("RAY_AUTH_MODE")) != "token":  # set by Ray if it is not set
        ray.shutdown()
        raise ConfigError(
            "Ray must ask for a token, as its clients can run code here: got "
            f"RAY_AUTH_MODE={mode or ''} and Ray {ray.__version__}. Set RAY_AUTH_MODE=token, with Ray 2.52 or later."
        )
