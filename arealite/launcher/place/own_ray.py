"""A private single-node Ray for a master outside a cluster: it admits only the run and leaves nothing behind."""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray

from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.utils.devices import visible_gpus
from arealite.utils.files import file_lock
from arealite.utils.secret import ensure_secret

_YOUNG_S = 60.0  # a folder of this age may not be locked yet, unless Ray has started there


@contextmanager
def own_ray(run: RunFolder, num_gpus: int) -> Iterator[None]:
    """Start Ray for the workers of a run; the block must end it. A client needs the run's secret.

    It listens on all interfaces and runs what it is sent.
    """
    run.path.mkdir(parents=True, exist_ok=True)
    ensure_secret(run.path)
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(run.secret)
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()  # of another run in this process
    with _folder() as folder:
        _start(num_gpus, folder)
        yield


@contextmanager
def _folder() -> Iterator[str]:
    """Make a folder for Ray's logs and sockets, whose paths must be short; remove it, and those of dead masters."""
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    for left in base.glob("arealite-ray-*"):
        with suppress(OSError):  # of another user, or of a running master
            was_locked = any(left.glob("session*")) or time.time() - left.stat().st_mtime > _YOUNG_S
            if left.stat().st_uid == os.geteuid() and was_locked:
                with file_lock(left / "lock", timeout_s=0.0):
                    shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix="arealite-ray-", dir=base, ignore_cleanup_errors=True) as folder,
        file_lock(Path(folder, "lock"), timeout_s=0.0),
    ):
        yield folder


def _start(num_gpus: int, folder: str) -> None:
    """Start Ray on this node, for the workers of this process, which from then on leaves the GPUs to them."""
    gpus = visible_gpus() if num_gpus else []
    if len(gpus) < num_gpus:
        raise ConfigError(
            f"this node must have a GPU for each worker: got {len(gpus)} and {num_gpus} workers. Lower "
            "workers.<role>.ranks, or set cluster.n_gpus_per_node=0 to run on the CPU."
        )
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[:num_gpus])
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports to the makers of Ray
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # no worker of ours is one without variables
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
