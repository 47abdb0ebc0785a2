"""How far one process carries a run: simulated clusters of H100s, and the CPU time of the process with the account.

    python benchmarks/scale.py [--gpus 128 512] [--steps 3] [--json] [--out benchmarks/results/scale.jsonl]

An 8B model, servers of 4 GPUs, a quarter of the GPUs trains, 2 prompts a GPU and step, each with 16 answers of 8,192
tokens in the mean (lognormal, at most 31,744), bound 2. `free`: the client costs no time. `one process`: 0.9 ms per
reply and 1.8 us per token, one reply after the other, as measured with real replies. `records`: 0.3 ms per reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from circumstances import options, report

from arealite.simulate.run import LognormalLengths, Scenario, Simulation
from arealite.simulate.servers import ServerProfile, SimulatedServer, SimulatedSession

ACCOUNTS = {"free": (0.0, 0.0), "one process": (0.9e-3, 1.8e-6), "records": (0.3e-3, 0.0)}  # s per reply, per token
_GRAIN = 256  # tokens that a simulated one stands for
_TOKEN_BYTES = 16  # of a reply
_TRAIN_TOKEN_S = 1.93e-4  # of one GPU


class _OneProcess(SimulatedSession):
    """Hands completions on one after the other, each after the CPU time that it costs."""

    def __init__(self, servers: dict[str, SimulatedServer], reply_s: float, token_s: float) -> None:
        super().__init__(servers)
        self.busy_s, self._free_at = 0.0, 0.0
        self._reply_s, self._token_s = reply_s, token_s

    @contextlib.asynccontextmanager
    async def request(self, method: str, url: Any, *, data: bytes | None, allow_redirects: bool) -> Any:
        async with super().request(method, url, data=data, allow_redirects=allow_redirects) as reply:
            if url.path == "/generate":
                cost_s = self._reply_s + self._token_s * _GRAIN * len(reply.answer) / _TOKEN_BYTES
                now = asyncio.get_running_loop().time()
                self._free_at = max(self._free_at, now) + cost_s
                self.busy_s += cost_s
                await asyncio.sleep(self._free_at - now)
            yield reply


def cluster(gpus: int, steps: int) -> Scenario:
    """Return the run on so many GPUs."""
    trainers = gpus // 4
    server = ServerProfile(
        *(2.5e-3, 1.0e-5, 1.5e-8, 8e-6),
        cache_tokens=1.76e6 / _GRAIN,
        grain=_GRAIN,
        bytes_per_s=3e10,
        round_trip_s=0.001,
    )
    return Scenario(
        num_servers=(gpus - trainers) // 4,
        server=server,
        batch_size=2 * gpus,
        group=16,
        lengths=LognormalLengths(8192 / _GRAIN, 0.9, 31744 // _GRAIN),
        max_new_tokens=31744 // _GRAIN,
        prompt=4,
        train_s=1.0,
        train_token_s=_TRAIN_TOKEN_S / trainers * _GRAIN,
        publish_s=0.3,
        weight_bytes=1.6e10,
        num_buckets=15,
        steps=steps,
        warm_up=3,
    )


def measure(gpus: int, account: str, steps: int) -> dict[str, Any]:
    """Simulate one run, and return what its measured steps were like."""
    began = time.process_time()
    simulation = Simulation(cluster(gpus, steps))
    simulation.session = session = _OneProcess(simulation.servers, *ACCOUNTS[account])
    result = simulation.run()
    spent = {f"{part}_s": round(seconds / steps, 2) for part, seconds in result.spent_s.items()}
    return {
        "gpus": gpus,
        "account": account,
        "step_s": round(result.seconds / steps, 1),
        "ktok_s": round(result.num_trained * _GRAIN / result.seconds / 1000, 1),
        **spent,
        "account_busy": round(session.busy_s / result.moments[-1][-1], 3),
        "staleness": round(result.mean_staleness, 2),
        "cpu_s": round(time.process_time() - began, 1),
        "failure": None if result.failure is None else str(result.failure),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--accounts", nargs="+", choices=list(ACCOUNTS), default=list(ACCOUNTS))
    parser.add_argument("--steps", type=int, default=3, help="that are measured")
    args = parser.parse_args()
    for gpus in args.gpus:
        for account in args.accounts:
            report(args, measure(gpus, account, args.steps))


if __name__ == "__main__":
    main()
