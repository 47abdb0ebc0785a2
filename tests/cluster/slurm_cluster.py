"""A real Slurm on this one machine: munged, slurmctld and a slurmd per node, all ours, nothing under /etc.

Debian's packages `slurm-wlm` and `munge` and root are enough. All nodes have the machine's host name and differ by
port, so programs must go by SLURMD_NODENAME. A GPU is a copy of /dev/null: jobs get CUDA_VISIBLE_DEVICES, but no
device. Jobs are real processes; CPUs and memory are only what the scheduler counts. Daemons end with this process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from testing_ports import held_port

from arealite.utils.processes import die_with_parent, is_alive, send_signal, wait_gone

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
_START_S = 120.0
_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=10
KillWait=10
MinJobAge=600
DefMemPerCPU=100
AccountingStorageType=accounting_storage/none
"""
"""Requeued jobs wait for `cred_expire`, and a silent slurmd is noticed after `SlurmdTimeout`: both are far shorter here
than on a real cluster (120 s and 300 s)."""


def why_impossible() -> str:
    """Tell what this machine lacks; empty if it can have a cluster."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)} (apt-get install --no-install-recommends slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "not root"


class SlurmCluster:
    """The cluster, as a context."""

    def __init__(self, folder: Path, *, num_nodes: int, gpus_per_node: int = 0, cpus_per_node: int = 16) -> None:
        self.folder = folder
        self.nodes = [f"node{number}" for number in range(1, num_nodes + 1)]
        self._gpus = gpus_per_node
        self._cpus = cpus_per_node
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """Return our environment with this cluster's configuration, and none of a job that we may be in."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        self._configure()
        try:
            key, socket_path = self.folder / "munge.key", self.folder / "munge.socket"
            files = [f"--{name}-file={self.folder}/munged.{name}" for name in ("pid", "log", "seed")]
            self._start(
                "munged", ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket_path}", *files]
            )
            self._wait_for("munged to listen", socket_path.exists)
            self._start("slurmctld", ["slurmctld", "-D"])
            for node in self.nodes:
                self.start_slurmd(node)
            self._wait_for("all nodes to be idle", lambda: self._num_idle() == len(self.nodes))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """Kill the daemons, which would start more, then what is left of jobs: steps outlive their slurmd."""
        for process in self._daemons.values():
            process.kill()
            process.wait(60)
        for _ in range(3):
            for pid in (left := self.processes()):
                send_signal(pid, signal.SIGKILL)
            wait_gone(left, 5)

    def run(self, *command: str, timeout_s: float = 120) -> str:
        """Run a command of Slurm and return what it prints."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=True
        ).stdout

    def start_slurmd(self, node: str) -> None:
        """Start the daemon of a node."""
        self._start(node, ["slurmd", "-D", "-N", node])

    def kill_slurmd(self, node: str) -> None:
        """SIGKILL the daemon of a node; steps there go on."""
        self._daemons[node].kill()
        self._daemons[node].wait(60)

    def state(self, node: str) -> str:
        """Return the state of a node, e.g. `idle` or `down*`."""
        return self.run("sinfo", "-hN", "-n", node, "-o", "%t").strip()

    def processes(self) -> list[int]:
        """Return the living processes of all jobs: step daemons, and whatever has this cluster in its environment."""
        marker = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.name().startswith("slurmstepd"):  # its title is where its environment was
                    is_ours = any(file.path.startswith(f"{self.folder}/") for file in process.open_files())
                else:
                    environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                    is_ours = marker in environment and any(one.startswith(b"SLURM_JOB_ID=") for one in environment)
                if is_ours and is_alive(process.pid):
                    found.append(process.pid)
        return found

    def _configure(self) -> None:
        for name in ("state", "spool", "dev"):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        lines = [_CONF.format(folder=self.folder, host=host, port=held_port())]
        gres = []
        if self._gpus:
            lines.append("GresTypes=gpu")
            for number in range(self._gpus):
                os.mknod(self.folder / "dev" / f"gpu{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
                gres += [
                    f"NodeName={node} Name=gpu File={self.folder}/dev/gpu{number} Flags=nvidia_gpu_env"
                    for node in self.nodes
                ]
            (self.folder / "gres.conf").write_text("\n".join(gres) + "\n")
        has = f"CPUs={self._cpus} RealMemory=64000 State=UNKNOWN" + (f" Gres=gpu:{self._gpus}" if self._gpus else "")
        lines += [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={held_port()} {has}" for node in self.nodes
        ]
        lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")

    def _start(self, name: str, command: Sequence[str]) -> None:
        parent = os.getpid()
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),
            )

    def _num_idle(self) -> int:
        with contextlib.suppress(subprocess.SubprocessError):
            return self.run("sinfo", "-hN", "-o", "%t", timeout_s=30).split().count("idle")
        return 0

    def _wait_for(self, what: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_S
        while not is_so():
            ended = [name for name, process in self._daemons.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "".join(path.read_text()[-2000:] for path in self.folder.glob("*.out"))
                raise RuntimeError(f"waited for {what}; ended: {ended or 'none'}\n{logs}")
            time.sleep(0.05)
