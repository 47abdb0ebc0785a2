"""How far one process carries a run: simulated clusters of H100s, and the CPU time of the process with the account.

    python benchmarks/scale.py [--gpus 64 128 256 512] [--bounds 0 1 2 4 8] [--steps 3]
        [--plot benchmarks/results/scale.svg] [--json] [--out benchmarks/results/scale.jsonl]

An 8B model, servers of 4 GPUs, a quarter of the GPUs trains, 2 prompts a GPU and step (at most 8,192), each with 16
answers of 8,192 tokens in the mean (lognormal, at most 31,744), bound 2. `free`: the client costs no time. `one
process`: 0.9 ms per reply and 1.8 us per token, one reply after the other, as measured with real replies. `records`:
0.3 ms per reply. `--bounds` are those of 128 GPUs. `--plot` draws the newest results of the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from circumstances import options, report

from arealite.planner.scenario import GroupLengths, Scenario, ServerProfile
from arealite.simulate.run import Simulation
from arealite.simulate.servers import SimulatedServer, SimulatedSession

ACCOUNTS = {"free": (0.0, 0.0), "one process": (0.9e-3, 1.8e-6), "records": (0.3e-3, 0.0)}  # s per reply, per token
RESULTS = Path(__file__).parent / "results" / "scale.jsonl"
_GRAIN = 256  # tokens that a simulated one stands for
_TOKEN_BYTES = 16  # of a reply
_TRAIN_TOKEN_S = 1.93e-4  # of one GPU
_MOST_PROMPTS = 8192
_BOUND, _BOUNDS_GPUS = 2, 128
_COLOURS = ("#0072b2", "#d55e00", "#009e73")


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


def cluster(gpus: int, bound: int, steps: int) -> Scenario:
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
        batch_size=min(2 * gpus, _MOST_PROMPTS),
        group=16,
        bound=bound,
        lengths=_lengths(),
        max_new_tokens=31744 // _GRAIN,
        prompt=4,
        train_s=1.0,
        train_token_s=_TRAIN_TOKEN_S / trainers * _GRAIN,
        publish_s=0.3,
        weight_bytes=1.6e10,
        num_buckets=15,
        steps=steps,
        warm_up=3 * max(1, bound - 1),  # the first batches share the servers with those after them
    )


def _lengths() -> GroupLengths:
    """Return lognormal completions of 8,192 tokens on average, at most 31,744, in simulated tokens."""
    drawn = np.random.default_rng(1).lognormal(math.log(8192 / _GRAIN) - 0.9**2 / 2, 0.9, 10_000)
    return GroupLengths(drawn.round().clip(1, 31744 // _GRAIN).astype(int).tolist(), 1)


def measure(gpus: int, account: str, bound: int, steps: int) -> dict[str, Any]:
    """Simulate one run, and return what its measured steps were like."""
    began = time.process_time()
    simulation = Simulation(cluster(gpus, bound, steps))
    simulation.session = session = _OneProcess(simulation.servers, *ACCOUNTS[account])
    result = simulation.run()
    spent = {f"{part}_s": round(seconds / steps, 2) for part, seconds in result.spent_s.items()}
    return {
        "gpus": gpus,
        "account": account,
        "bound": bound,
        "step_s": round(result.seconds / steps, 1),
        "ktok_s": round(result.num_trained * _GRAIN / result.seconds / 1000, 1),
        **spent,
        "virtual_s": round(result.moments[-1][-1]),
        "account_busy": round(session.busy_s / result.moments[-1][-1], 3),
        "staleness": round(result.mean_staleness, 2),
        "cpu_s": round(time.process_time() - began, 1),
        "failure": None if result.failure is None else str(result.failure),
    }


def plot_of(results: Iterable[Mapping[str, Any]]) -> str:
    """Return an SVG of throughput against the GPUs for each account, and against the bound."""
    found = {(one["gpus"], one["account"], one["bound"]): one["ktok_s"] for one in results if one["failure"] is None}
    accounts = {
        f"client: {account}": {
            gpus: rate for (gpus, name, bound), rate in found.items() if (name, bound) == (account, _BOUND)
        }
        for account in ACCOUNTS
    }
    bounds = {bound: rate for (gpus, name, bound), rate in found.items() if (gpus, name) == (_BOUNDS_GPUS, "free")}
    panels = (
        _panel(60, "thousand tokens/s, by GPUs (bound 2)", accounts, is_log=True),
        _panel(460, "thousand tokens/s, by staleness bound", {f"{_BOUNDS_GPUS} GPUs": bounds}, is_log=False),
    )
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 300" font-family="sans-serif" font-size="12">'
    return f'{head}<rect width="100%" height="100%" fill="white"/>{"".join(panels)}</svg>\n'


def _panel(left: int, title: str, curves: Mapping[str, Mapping[int, float]], *, is_log: bool) -> str:
    """Return a chart of curves over the same axes, whose vertical one begins at 0."""
    axis = sorted({x for curve in curves.values() for x in curve})
    scale = math.log2 if is_log else float
    low, high = scale(axis[0]), scale(axis[-1])
    top = max(rate for curve in curves.values() for rate in curve.values())
    unit = next(unit for power in range(9) for unit in (10**power, 2 * 10**power, 5 * 10**power) if top / unit <= 5)
    parts = [f'<text x="{left}" y="20" font-weight="bold">{title}</text>']
    place = {x: left + 300 * (scale(x) - low) / (high - low) for x in axis}
    for index in range(math.floor(top / unit) + 1):
        y = 250 - 190 * index * unit / top
        parts.append(f'<path d="M{left} {y:.1f} h300" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{index * unit:g}</text>')
    parts += [f'<text x="{place[x]:.1f}" y="268" text-anchor="middle">{x:,}</text>' for x in axis]
    for row, ((name, curve), colour) in enumerate(zip(curves.items(), _COLOURS, strict=False)):
        points = [(place[x], 250 - 190 * rate / top) for x, rate in sorted(curve.items())]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        width = 2 if row else 5  # the others may lie on the first
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(f'<text x="{left + 180}" y="{200 + 16 * row}" fill="{colour}">{name}</text>')
    return "".join(parts)


def main() -> None:
    """Simulate every size with every account, then every bound, and draw them."""
    parser = options(__doc__)
    parser.add_argument("--gpus", type=int, nargs="*", default=[64, 128, 256, 512])
    parser.add_argument("--bounds", type=int, nargs="*", default=[0, 1, 2, 4, 8])
    parser.add_argument("--accounts", nargs="+", choices=list(ACCOUNTS), default=list(ACCOUNTS))
    parser.add_argument("--steps", type=int, default=3, help="that are measured")
    parser.add_argument("--plot", type=Path, help="write an SVG of the results in --out")
    args = parser.parse_args()
    runs = [(gpus, account, _BOUND) for gpus in args.gpus for account in args.accounts]
    runs += [(_BOUNDS_GPUS, "free", bound) for bound in args.bounds]
    for run in dict.fromkeys(runs):
        report(args, measure(*run, args.steps))
    if args.plot:
        lines = (args.out or RESULTS).read_text(encoding="utf-8").splitlines()
        args.plot.write_text(plot_of(json.loads(line) for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
