"""Trains on a real Ray cluster of four machines, and loses a server's machine and the trainer's on the way.

    PYTHONPATH=tests python -m cluster.on_ray

Every job has a machine of its own. A server whose machine is lost comes back on another one while training goes on;
after the loss of the trainer's machine the run goes on from its checkpoint. The last line is `RESULT {json}`.
"""

from __future__ import annotations

import sys

from chaos.experiment import Experiment
from harness.processes import marked
from harness.report import make_folder, say

from cluster.followed import PACED, ClusterRun, tell_result
from cluster.ray_cluster import RayCluster, ray_cluster

MACHINES = ("machine-1", "machine-2", "machine-3", "machine-4")
STEPS = 16
ALLOCATION = "lite.d3p1t1+d1p1t1"
OVERRIDES = (
    "cluster.n_nodes=4",
    "cluster.n_gpus_per_node=1",
    "launcher.node_timeout=10",
    "launcher.trainer_threads=1",
    "rollout.setup_timeout=120",
    "launcher.stall_timeout=600",  # the suite holds the trainer while servers start
)
BACK_S = 120.0
END_S = 240.0


def main() -> int:
    """Run everything and print the result."""
    folder, model = make_folder("ray")
    experiment = Experiment(folder / "run", model, ALLOCATION, steps=STEPS, entry=PACED)
    with ray_cluster(*MACHINES) as cluster:
        say(f"a Ray cluster of {len(MACHINES)} machines with 4 GPUs each")
        launched = ClusterRun.start(experiment, "arealite.launcher.ray", *OVERRIDES, RAY_ADDRESS=cluster.address)
        with launched as run:
            run.do(2)
            first, num_processes = machines(cluster, run), len([*marked(experiment.folder)])
            say(f"{num_processes} processes: {first}")
            lose(cluster, run, first["server-0"], "lost_server_machine")
            run.do(2)
            run.wait("server-0 again", lambda: run.said("launcher | server-0 is ready at") == 2, BACK_S)
            then = machines(cluster, run)
            say(f"server-0 is back: {then}")
            run.release()
            lose(cluster, run, then["trainer-0"], "lost_trainer_machine", is_fatal=True)
            verdict = run.finish(END_S)
    result = {"nodes": len(MACHINES), "processes": num_processes, "steps": STEPS, "faults": run.outcome.faults}
    return tell_result(result, verdict, folder)


def lose(cluster: RayCluster, run: ClusterRun, machine: str, kind: str, *, is_fatal: bool = False) -> None:
    """Kill a machine with everything on it."""
    run.fault(kind, f"{machine} is killed", is_fatal=is_fatal)
    cluster.kill(machine)


def machines(cluster: RayCluster, run: ClusterRun) -> dict[str, str]:
    """Return where the run's jobs are."""
    servers = {f"server-{i}": run.process("arealite.launcher.serve", f"server-{i}") for i in range(3)}
    jobs = servers | {"trainer-0": run.process("arealite.launcher.place.guard", str(PACED))}
    return {name: cluster.machine_of(process) for name, process in jobs.items()}


if __name__ == "__main__":
    sys.exit(main())
