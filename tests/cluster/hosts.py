"""torchrun over hosts whose network fails: `python -m cluster.hosts`, with `tests` on the path. Needs root.

Three hosts (see `netns`): a trainer's rank on 1 and 2, a server on 2 and 3. One run of asynchronous GRPO goes through
all faults: answers of a server vanish, connections between the ranks are reset, a rank is killed, a host is cut off.
The suite allows the ranks one step after the other (see `paced`), so that no fault comes after the last step.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

from chaos.experiment import Experiment
from chaos.promises import judge
from harness.processes import Broken, Program, command_of, guarded, wait_until
from harness.report import make_folder, say, skip

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.api.run_folder import RunFolder
from arealite.launcher.plan.jobs import server_job
from arealite.launcher.plan.plan import make_plan
from arealite.utils.distributed import NODE_TIMEOUT_S
from arealite.utils.processes import REGISTRY_VARIABLE, descendants, is_alive, send_signal, wait_gone
from arealite.utils.secret import SECRET_VARIABLE, ensure_secret
from cluster import paced
from cluster.followed import PACED, STEP_S, ClusterRun, tell_result
from cluster.netns import Network, network, why_impossible

TRAINERS, SERVERS = (1, 2), (2, 3)
"""Their hosts."""
STEPS = 14
OVERRIDES = [
    "recover.mode=fault",
    "rollout.num_servers=2",
    "rollout.request_timeout=15",
    "rollout.weight_update_timeout=15",
    "evaluator.freq_steps=null",
]
_END_S = 120.0
"""For a program to end that was asked to, and for ranks that are cut off from each other."""
_PORT = 29400


class Hosts(ClusterRun):
    """The run, whose programs are those of the trainers."""

    def __init__(self, net: Network, experiment: Experiment) -> None:
        super().__init__(experiment, [])
        self.net = net
        self.servers: list[Program] = []

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Start everything, and end it."""
        experiment = self.experiment
        experiment.temporary.mkdir(parents=True)
        paced.allow(experiment.folder, 0)
        arguments = [*experiment.arguments, *OVERRIDES]
        config, _ = load_expr_config(arguments[1:], GRPOConfig)
        experiment.run_folder.mkdir(parents=True)
        env = {SECRET_VARIABLE: ensure_secret(experiment.run_folder)}
        env[REGISTRY_VARIABLE] = str(RunFolder(config).registry)
        with contextlib.ExitStack() as stack:
            for host, placement in zip(SERVERS, make_plan(config).servers, strict=True):
                job = server_job(config, placement, self.net.address(host), [])
                self.servers.append(stack.enter_context(self._program(host, job.name, job.command, env | job.env)))
            for host in TRAINERS:
                torchrun = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "8", "--monitor-interval", "1"]
                torchrun += ["--local-addr", self.net.address(host), "--rdzv-backend", "c10d"]
                torchrun += ["--rdzv-endpoint", f"{self.net.address(TRAINERS[0])}:{_PORT}"]
                torchrun += ["--rdzv-conf", f"is_host={int(host == TRAINERS[0])}"]
                torchrun += ["--log-dir", str(experiment.folder / "torchrun")]
                command = [sys.executable, "-m", "torch.distributed.run", *torchrun, *arguments]
                env = {"OMP_NUM_THREADS": "1"}
                self.programs.append(stack.enter_context(self._program(host, f"torchrun-{host}", command, env)))
            yield

    def _program(
        self, host: int, name: str, command: list[str], env: dict[str, str]
    ) -> contextlib.AbstractContextManager[Program]:
        folder, env = self.experiment.folder, self.experiment.environment | env
        return guarded(self.net.command(host, command), folder / f"{name}.txt", env=env, cwd=folder)

    def rank(self, host: int) -> int:
        """Return the process of a host's rank."""
        trainer = self.programs[TRAINERS.index(host)].process.pid
        ours = [pid for pid in descendants(trainer) if _is_rank(command_of(pid))]
        if len(ours) != 1:
            raise Broken(f"host {host} must have one rank: got {ours}")
        return ours[0]


def suffer(run: Hosts) -> None:
    """Do everything to a run."""
    net = run.net
    run.do(2)

    run.fault("one_way", "what the server on host 3 says to rank 0 is lost")
    net.one_way(3, 1)
    run.do(2)
    net.heal()
    say("healed")
    run.do(1)

    ranks = [run.rank(host) for host in TRAINERS]
    run.fault("reset", "connections between the ranks are reset")
    net.reset(1, 2, except_port=_PORT)
    net.reset(2, 1, except_port=_PORT)
    wait_until("an end of both ranks", lambda: not any(map(is_alive, ranks)), STEP_S)
    net.heal()
    say("both ranks have ended; healed")
    run.do(2)

    run.fault("kill_rank", "kill -9 of rank 1")
    send_signal(run.rank(2), signal.SIGKILL)
    run.do(2)

    ranks = [run.rank(host) for host in TRAINERS]
    run.fault("cut", "host 2 is cut off")
    net.cut(2)
    left = wait_gone(ranks, _END_S)
    for trainer in run.programs:
        if f"must answer within {NODE_TIMEOUT_S:g} s" not in trainer.text():
            raise Broken(f"{trainer.name} must say which host is silent")
    if left:
        raise Broken(f"both ranks must end within {_END_S:g} s: {left} did not")
    say("both ranks have ended with an error that names the other host; healed")
    net.heal()
    run.do(1)

    run.release()
    for trainer in run.programs:
        trainer.expect_done(STEP_S)
    say("the run is done")
    for server in run.servers:
        server.process.terminate()
    for server in run.servers:
        server.expect_done(_END_S)


def main() -> int:
    """Run everything and print the result."""
    if reason := why_impossible():
        return skip(reason)
    folder, model = make_folder("hosts")
    experiment = Experiment(folder / "run", model, "lite.d2p1t1+d2p1t1", steps=STEPS, entry=PACED)
    failures = []
    with network(3) as net:
        run = Hosts(net, experiment)
        try:
            with run.started():
                suffer(run)
        except Broken as broken:
            failures.append(str(broken))
    faults, run.outcome.is_done = run.outcome.faults, True
    verdict = judge(experiment, run.outcome)
    verdict.broken += failures
    result = {"nodes": 3, "processes": len(TRAINERS) + len(SERVERS), "steps": run.last_step, "faults": faults}
    return tell_result(result, verdict, folder)


def _is_rank(command: list[str]) -> bool:
    return str(PACED) in command and "torch.distributed.run" not in command


if __name__ == "__main__":
    sys.exit(main())
