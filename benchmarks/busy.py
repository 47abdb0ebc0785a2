"""What a fine-tuning step of the quickstart takes beside other programs, in seconds.

    python benchmarks/busy.py [--rounds 3] [--steps 15] [--json] [--out FILE]

Every round trains on a quiet machine, beside two busy loops, and beside three at nice 19, in turn, with the threads of
the trainer as launchers start them and (`waits: as OpenMP`) as OpenMP waits by itself. `ratio` is the step over the
quiet one of the same kind. Numbers are medians over rounds of the median step.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from circumstances import options, report

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "examples" / "arealite"
LOADS = {"quiet": (0, 0), "two loops": (2, 0), "three loops at nice 19": (3, 19)}
WAITS = {"on own cores": "", "as OpenMP": "OMP_PROC_BIND=false"}


@contextlib.contextmanager
def loops(count: int, nice: int) -> Iterator[None]:
    """Keep cores busy."""
    command = ["nice", "-n", str(nice), sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def step_s(folder: Path, model: Path, variables: str, num_steps: int) -> float:
    """Fine-tune and return the median step."""
    config = SCRIPTS / "configs" / "gsm8k_sft_cpu.yaml"
    command = [sys.executable, "-m", "arealite.launcher.local", str(SCRIPTS / "gsm8k_sft.py"), "--config", str(config)]
    command += [f"model.path={model}", f"cluster.fileroot={folder}", "experiment_name=busy", "trial_name=run"]
    command += [
        f"train_dataset.path={ROOT}/examples/quickstart/word_problems.py:rows",
        f"total_train_steps={num_steps}",
    ]
    command += ["valid_dataset=null", "evaluator.freq_steps=null", "launcher.preflight=false"]
    command += [f"launcher.trainer_env_vars={variables}"] if variables else []
    subprocess.run(command, check=True, capture_output=True)
    rows = map(json.loads, (folder / "busy" / "run" / "metrics.jsonl").read_text().splitlines())
    return statistics.median([row["time/step_s"] for row in rows][num_steps // 5 :])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        subprocess.run([sys.executable, "-m", "arealite.cli.main", "tiny-model", "--out", model], check=True)
        for number in range(args.rounds):
            for load, (count, nice) in LOADS.items():
                for waits, variables in WAITS.items():
                    with loops(count, nice):
                        seconds = step_s(Path(name) / f"{number}{load}{waits}", model, variables, args.steps)
                    found[waits, load].append(seconds)
    medians = {key: statistics.median(values) for key, values in found.items()}
    for (waits, load), seconds in medians.items():
        result = {"waits": waits, "load_of_others": load, "step_s": seconds, "ratio": seconds / medians[waits, "quiet"]}
        report(args, result | {"rounds": args.rounds, "steps": args.steps})


if __name__ == "__main__":
    main()
