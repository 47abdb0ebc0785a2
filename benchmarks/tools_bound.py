"""Which bound on staleness, and how many episodes at once, hide tools of 200 ms: simulated, a core for each process.

    python benchmarks/tools_bound.py [--steps 150] [--json] [--out FILE]

The case `tools` of `async_vs_sync.py`: 8 groups of 4 episodes of 64 tokens with three tools in between. Simulated
episodes (docs/simulate.md) have one turn: a completion, and then 0.6 s of tools. `ratio` is the speed over that of a
bound of 0, the synchronous mode. Seconds of training, of publication and of the server, by sequence, are those that the
asynchronous mode took on two cores.
"""

from __future__ import annotations

from typing import Any

from circumstances import options, report

from arealite.planner.scenario import GroupLengths, Scenario, ServerProfile
from arealite.simulate.run import simulate

TURN_TOKENS, TOOLS_S, TRAIN_S, PUBLISH_S = 64, 0.6, 0.41, 0.17
CASES = ((1, 32), (2, 32), (4, 32), (4, 64), (8, 32), (8, 64), (8, 128), (16, 128))
"""Bounds, and prompts at once."""


def simulated(bound: int, concurrency: int, steps: int) -> dict[str, Any]:
    """Return steps per second, and mean staleness, after a warm-up."""
    per_sequence_s = 1.2e-4 + 3 * 1.6e-3 / TURN_TOKENS  # with three more requests
    server = ServerProfile(3.6e-3, per_sequence_s, 0.0, 0.0, 1.6e-3, 128, bytes_per_s=1e12, swap_s=0.03)
    found = simulate(
        Scenario(
            num_servers=1,
            server=server,
            batch_size=8,
            group=4,
            bound=bound,
            concurrency=concurrency,
            lengths=GroupLengths((TURN_TOKENS,), 1),
            prompt=16,
            publish_s=PUBLISH_S,
            train_s=TRAIN_S,
            train_token_s=0.0,
            reward_s=TOOLS_S,
            weight_bytes=1.0,
            steps=steps,
            warm_up=3 * bound + 10,
        )
    )
    assert not found.failure, found.failure
    waits = found.spent_s["rollout"] / found.seconds
    return {"steps_per_s": len(found.step_s) / found.seconds, "waits": waits, "staleness": found.mean_staleness}


def main() -> None:
    """Simulate every case and print a line for it."""
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=150, help="of each case, with a warm-up")
    args = parser.parse_args()
    synchronous = simulated(0, 32, args.steps)["steps_per_s"]
    for bound, concurrency in CASES:
        found = simulated(bound, concurrency, args.steps)
        found["ratio"] = found["steps_per_s"] / synchronous
        report(args, {"case": "tools", "bound": bound, "concurrency": concurrency, **found})


if __name__ == "__main__":
    main()
