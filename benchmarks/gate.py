"""Whether a part has become slow: its CPU time over that of plain code that does the same job, alternating in one run.

    python benchmarks/gate.py [--rounds 5] [--json] [--out FILE]

- `packing`: 512 rows of seven columns into micro-batches, over `torch.cat` of the same rows, column by column
- `runtime`: an episode of one request, from the prompt to the batch, over the request alone (`runtime_overhead.py`)
- `publication`: a checkpoint of 17.5 MiB for servers, with fingerprints, over `save_file` of the same tensors

Ratios are medians over the rounds. Ends with 1 if one is above its bound, which leaves room for other machines.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from circumstances import options, report
from packing import batch_of, lengths_of, plan
from runtime_overhead import CASES, measure
from safetensors.torch import load_file, save_file
from weight_sync import SIZES, make_tiny_model

from arealite.api.cli_args import TrainEngineConfig
from arealite.api.io_struct import WeightUpdateMeta
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.utils.tensors import pack_rows

BOUNDS = {"packing": 5.0, "runtime": 10.0, "publication": 6.0}


def cpu_s(action: Callable[[], object]) -> float:
    """Return the seconds of CPU that this process takes for it."""
    began = time.process_time()
    action()
    return time.process_time() - began


def packing(rounds: int) -> list[float]:
    """Return our CPU time over that of plain code, of each round."""
    lengths = lengths_of("lognormal", 512, random.Random(1))
    batch = batch_of(lengths)
    mask = batch["attention_mask"]
    groups = plan(mask)

    def plain() -> None:
        for group in groups:
            for column in batch.values():
                torch.cat([column[row, : lengths[row]] for row in group])

    return [cpu_s(lambda: [pack_rows(batch, group) for group in plan(mask)]) / cpu_s(plain) for _ in range(rounds)]


def runtime(rounds: int) -> list[float]:
    """Return the CPU time of an episode over that of its request, of each round."""
    client, episodes = CASES[:2]
    cost = lambda case: measure(case, seconds=2.0, is_profiled=False)["cpu_us"]  # noqa: E731
    return [cost(episodes) / cost(client) for _ in range(rounds)]


def publication(rounds: int) -> list[float]:
    """Return the CPU time of a checkpoint for servers over that of its file alone, of each round."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny_model(Path(folder) / "model", **SIZES["small"]))
        engine = FSDPEngine(TrainEngineConfig(path=model, dtype="float32"))
        engine.initialize(None, None)

        def publish() -> None:
            meta = WeightUpdateMeta(type="disk", path=f"{folder}/weights", version=1)
            meta.transfer.wants_fingerprints = True
            engine.upload_weights(meta)

        publish()  # once, to warm up
        for _ in range(rounds):
            ours = cpu_s(publish)
            state = load_file(f"{folder}/weights/model.safetensors")
            ratios.append(ours / cpu_s(lambda state=state: save_file(state, f"{folder}/plain.safetensors")))
        engine.destroy()
    return ratios


def main() -> None:
    """Measure each part, and print a line for it."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    slow = []
    for part in (packing, runtime, publication):
        ratios, bound = part(args.rounds), BOUNDS[part.__name__]
        found = {"case": part.__name__, "ratio": statistics.median(ratios), "spread": [min(ratios), max(ratios)]}
        report(args, {**found, "bound": bound})
        slow += [part.__name__] * (found["ratio"] > bound)
    if slow:
        sys.exit(f"CPU time must stay below the bounds: got more in {', '.join(slow)}. Find what has become slow.")


if __name__ == "__main__":
    main()
