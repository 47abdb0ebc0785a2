"""`arealite calibrate`: measures what servers and trainer of a config take on this device, as a profile for
`arealite plan --gpu FILE`."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.api.run_folder import RunFolder
from arealite.cli.simulate import gpu_name
from arealite.launcher.start import start
from arealite.planner.cost import load_gpu, server_profile, training_s

if TYPE_CHECKING:  # they import torch
    from arealite.planner.memory import ModelShape


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "arealite calibrate CONFIG.yaml --out FILE.yaml [--gpu NAME] [key=value ...]"
    parser.description = "Start the run's servers and trainer, and measure decoding, prefill, a step and a publication."
    parser.add_argument("config", metavar="CONFIG.yaml", help="config of the run")
    parser.add_argument("--out", metavar="FILE.yaml", type=Path, required=True, help="profile to write")
    parser.add_argument("--gpu", metavar="NAME", help="profile whose peaks are the device's, as for `arealite plan`")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="keys to change")


def run(args: argparse.Namespace) -> int:
    """Measure, print what was measured beside what the profile gives, and write it."""
    from arealite.engine.hf_model import build_meta_model
    from arealite.planner.memory import model_shape

    words = [*args.overrides, "experiment_name=calibrate", f"trial_name={time.strftime('%Y%m%d-%H%M%S')}"]
    words += ["recover.mode=disabled", "launcher.preflight=false"]
    config, _ = load_expr_config(["--config", args.config, *words], GRPOConfig, ignore_unknown=True)
    gpu = load_gpu(gpu_name(args.gpu, config))
    if status := start(Path(__file__).with_name("calibrating.py"), args.config, words):
        return status
    points = json.loads(RunFolder(config).calibration.read_text(encoding="utf-8"))
    profile = fitted(points, config, model_shape(build_meta_model(config.actor.path, "sdpa")), gpu)
    args.out.write_text(yaml.safe_dump(profile, sort_keys=False), encoding="utf-8")
    for number, context, seconds in points["decode"]:
        print(f"{number:3} sequences of {context:4.0f} tokens: a step of decoding takes {1e3 * seconds:8.2f} ms")
    tokens, seconds = points["train"][-1]
    print(f"{tokens:,} trained tokens: {seconds:.2f} s; publication: {points['publish_s']:.2f} s; wrote {args.out}")
    return 0


def fitted(points: dict[str, Any], config: GRPOConfig, shape: "ModelShape", gpu: dict[str, float]) -> dict[str, float]:
    """Return a profile whose estimates are what was measured: its constants are those of `planner/cost.py`."""
    from arealite.simulate.workload import least_squares

    num_gpus = config.allocation.gen_tp_size if config.allocation else 1
    counts = np.array([[1.0, number, number * context] for number, context, _ in points["decode"]])
    step_s, sequence_s, context_s = least_squares(counts, np.array([seconds for *_, seconds in points["decode"]]))
    ideal = gpu | {"decode_bandwidth": 1.0, "prefill_flops": 1.0, "step_s": 0.0, "sequence_s": 0.0}
    roof = server_profile(shape, ideal, num_gpus=num_gpus, slots=1)
    # The share of the bandwidth explains what contexts add, or else no more than a step of one sequence takes.
    share = roof.context_s / context_s if context_s else gpu["decode_bandwidth"]
    share = max(share, roof.step_s / max(step_s, 1e-9))
    found = {"decode_bandwidth": share, "step_s": step_s - roof.step_s / share}
    rest = server_profile(shape, gpu | {"sequence_s": 0.0}, num_gpus=num_gpus, slots=1).sequence_s
    found["sequence_s"] = max(0.0, sequence_s - rest)
    found["prefill_flops"] = roof.prefill_s / points["prefill_s"]
    found["request_s"] = max(0.0, points["request_s"])
    sizes, seconds = np.array(points["train"]).T
    found["train_s"], token_s = least_squares(np.stack([np.ones(len(sizes)), sizes], axis=1), seconds)
    options = {"num_tokens": float(sizes[-1]), "context": points["context"]}
    at_peak = training_s(config, shape, gpu | {"mfu": 1.0, "train_s": 0.0, "train_token_s": 0.0}, **options)
    found |= {"mfu": at_peak / max(1e-9, token_s * sizes[-1]), "train_token_s": 0.0, "swap_s": 0.0}
    sent_s = shape.num_parameters * gpu["value_bytes"] / roof.bytes_per_s
    found["publish_s"] = max(0.0, points["publish_s"] - sent_s)
    return gpu | {key: float(f"{value:.4g}") for key, value in found.items()}
