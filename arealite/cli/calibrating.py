"""The script that `arealite calibrate` starts: measures the servers and the trainer of a config, and writes the numbers
into the run's folder."""

import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from tensordict import TensorDict

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import FinetuneSpec, ModelRequest
from arealite.api.run_folder import RunFolder
from arealite.api.workflow_api import RolloutWorkflow
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.utils.files import write_atomically
from arealite.weights.publish import publish_weights
from arealite.workflow.trajectory import sample_group, trajectory_from_response

POINTS = ((1, 8), (8, 8), (32, 8), (64, 8), (32, 256))
"""Sequences that decode together, and tokens of their prompts."""
_STEPS = 64  # of decoding, in each
_PREFILLED = 384  # tokens of the longer prompt
_ROUNDS = 3


class _Completions(RolloutWorkflow):
    """Samples completions of equal lengths at once."""

    def __init__(self, config: GRPOConfig, number: int, num_prompt: int, num_new: int) -> None:
        self._gconfig = config.gconfig.new(n_samples=1, min_new_tokens=num_new, max_new_tokens=num_new)
        self._number, self._num_prompt = number, num_prompt

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict:
        draw = random.Random(data["seed"])

        async def run(sample: int) -> TensorDict:
            ids = [draw.randrange(10, 100) for _ in range(self._num_prompt)]  # which no server has seen
            return trajectory_from_response(await engine.agenerate(ModelRequest(ids, self._gconfig)), sample % 2)

        return await sample_group(run, self._number)


def main(argv: list[str]) -> None:
    """Measure, as the script of a run, and write the numbers into its folder."""
    with ExitStack() as cleanup:
        measure(argv, cleanup)


def measure(argv: list[str], cleanup: ExitStack) -> None:
    """Take each measurement in turn, the median of its rounds after a first one."""
    config, _ = load_expr_config(argv, GRPOConfig, ignore_unknown=True)
    actor, rollout = FSDPPPOActor(config.actor), RemoteInferenceEngine(config.rollout)
    for engine in (actor, rollout):
        engine.initialize(None, FinetuneSpec(1, 8, 8, 1))
        cleanup.callback(engine.destroy)
    publish_weights(actor, rollout, version=0)
    numbers = itertools.count(1)

    def sampled(number: int, num_prompt: int, num_new: int) -> TensorDict:
        workflow = _Completions(config, number, num_prompt, num_new)
        return rollout.rollout_batch([{"seed": next(numbers)}], workflow)

    def usual_s(call: Callable[[], object]) -> float:
        taken = []
        for _ in range(1 + _ROUNDS):
            began = time.monotonic()
            call()
            taken.append(time.monotonic() - began)
        return statistics.median(taken[1:])

    decode, first_s = [], dict[int, float]()
    for number, num_prompt in POINTS:
        few, many = (usual_s(partial(sampled, number, num_prompt, new)) for new in (1, 1 + _STEPS))
        decode.append((number, num_prompt + _STEPS / 2, max(0.0, many - few) / _STEPS))
        first_s.setdefault(number, few)
    short_s, long_s = (usual_s(partial(sampled, 1, size, 1)) for size in (8, _PREFILLED))
    trained = []
    for number in (8, 32):
        batch = sampled(number, 8, _STEPS)
        trained.append((number * (8 + _STEPS), usual_s(partial(_update, config, actor, batch))))
    publish_s = usual_s(lambda: publish_weights(actor, rollout, version=next(numbers)))
    if int(os.environ.get("RANK", "0")) == 0:
        prefill_s = max(1e-9, long_s - short_s) / (_PREFILLED - 8)
        request_s = (first_s[64] - first_s[1]) / 63 - 8 * prefill_s  # what one more takes beside others
        found = {"decode": decode, "prefill_s": prefill_s, "request_s": request_s, "train": trained}
        found |= {"publish_s": publish_s, "context": float(8 + _STEPS)}
        write_atomically(RunFolder(config).calibration, json.dumps(found))


def _update(config: GRPOConfig, actor: FSDPPPOActor, batch: TensorDict) -> None:
    """Do what a script does with a batch; a reference takes as long as the policy."""
    batch = batch.clone()
    if config.actor.proximal == "recompute":
        batch["proximal_logprobs"] = actor.compute_logprobs(batch)
    if config.has_reference:
        batch["ref_logprobs"] = actor.compute_logprobs(batch)
    actor.compute_advantages(batch)
    actor.ppo_update(batch)


if __name__ == "__main__":
    main(sys.argv[1:])
