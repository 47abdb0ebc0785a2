"""How much faster asynchronous training is than synchronous: the same loop, model and prompts, one flag apart.

    python benchmarks/async_vs_sync.py [--case tools] [--rounds 5] [--steps 6] [--json] [--out FILE]

One embedded server and one trainer, each a process with one thread. A round trains `steps` steps in either mode, in
turn, after three that fill the pipeline; steps per second are compared within the round, so that other work on the
machine, which lasts longer than a round, slows both. Lengths are given (no token ends a completion earlier) and the
same in both modes: `uniform`, 64 tokens; `long-tail`, lognormal of the same mean, cut at 512; `tools`, four turns of 16
tokens, between which a tool takes 200 ms. Ratios say what overlapping wins for these lengths on these cores; if the two
processes share less than two of them, there is less to overlap.

Where the time goes, as shares of the measured time: `rollout`, the trainer waits for a batch; `train` (logprobs,
advantages and update); `weights`; `server`, `trainer`, their CPU. `starved`: of the time in which a tool runs,
the share in which no request is with the server. `requests`: how many are on average in that time.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from circumstances import options, report
from model_configs import write_tiny
from tensordict import TensorDict

from arealite.api.cli_args import GenerationHyperparameters, GRPOConfig, load_expr_config
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import FinetuneSpec
from arealite.api.workflow_api import RolloutWorkflow
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.utils.hf import load_hf_tokenizer
from arealite.utils.network import hold_port, port_of
from arealite.utils.processes import die_with_parent
from arealite.weights.publish import publish_weights
from arealite.workflow.conversation import ChatModel, Conversation
from arealite.workflow.tools import FunctionTools
from arealite.workflow.trajectory import sample_group

CONFIG = Path(__file__).parents[1] / "examples" / "arealite" / "configs" / "gsm8k_grpo_cpu.yaml"
BATCHES = 64
TOOL_S = 0.2
WARM_UP = 3
MODES = ("synchronous", "asynchronous")


@dataclass(frozen=True)
class Case:
    """How long completions are, and how many turns with a tool between them a run has."""

    name: str
    mean_tokens: int = 64
    sigma: float = 0.0  # of the logarithm of lengths
    max_tokens: int = 512
    turns: int = 1
    prompts: int = 8
    group: int = 4

    def length(self, draw: random.Random) -> int:
        """Draw the tokens of each turn of a run."""
        tokens = draw.lognormvariate(math.log(self.mean_tokens) - self.sigma**2 / 2, self.sigma)
        return max(1, min(self.max_tokens, round(tokens)))


CASES = (Case("uniform"), Case("long-tail", sigma=1.0), Case("tools", mean_tokens=16, turns=4))


class Clock:
    """Integrates over time what runs at once. Only the event loop of episodes changes it."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.last = time.perf_counter()

    def tick(self) -> None:
        """Add the time since the last change."""
        now = time.perf_counter()
        if self.running["tools"]:
            self.seconds["tools"] += now - self.last
            self.seconds["starved"] += (now - self.last) * (not self.running["requests"])
            self.seconds["requests"] += (now - self.last) * self.running["requests"]
        self.last = now

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Count one more of this meanwhile."""
        self.tick()
        self.running[what] += 1
        try:
            yield
        finally:
            self.tick()
            self.running[what] -= 1


async def look_up(key: str) -> str:
    """Look something up, which takes 200 ms.

    Args:
        key: What.
    """
    await asyncio.sleep(TOOL_S)
    return f"{key} is 7."


class GivenLengths(RolloutWorkflow):
    """Runs whose turns are as long as the row says; random weights call no tool, so each turn is taken for a call."""

    def __init__(self, case: Case, gconfig: GenerationHyperparameters, tokenizer: Any) -> None:
        self.case, self.gconfig, self.model = case, gconfig, ChatModel(tokenizer)
        self.tools, self.clock = FunctionTools([look_up]), Clock()

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict:
        """Sample the group of one prompt."""
        return await sample_group(lambda sample: self.run(engine, data, sample), self.case.group)

    async def run(self, engine: InferenceEngine, data: dict[str, Any], sample: int) -> TensorDict:
        """Sample one run; its reward differs within the group."""
        length = data["lengths"][sample]
        gconfig = self.gconfig.new(min_new_tokens=length, max_new_tokens=length)
        talk = Conversation(engine, self.model, gconfig, sample=sample)
        messages = data["messages"]
        for turn in range(self.case.turns):
            if turn:
                with self.clock.of("tools"):
                    content = await self.tools.aexecute("look_up", {"key": "x"})
                messages = [{"role": "user", "content": content}]
            with self.clock.of("requests"):
                await talk.ask(messages)
        return talk.builder.finish(even_share(talk.response.output_tokens), sample_index=sample)


def even_share(ids: list[int]) -> float:
    """Return the share of even token ids: a reward that any model can learn, and that no two completions need share."""
    return sum(one % 2 == 0 for one in ids) / len(ids)


def main() -> None:
    """Measure every case and print one line each."""
    parser = options(__doc__)
    parser.add_argument("--case", choices=[case.name for case in CASES], help="only this one")
    parser.add_argument("--rounds", type=int, default=5, help="of every case; each trains in both modes")
    parser.add_argument("--steps", type=int, default=6, help="measured in a mode of a round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the server")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, served(f"{folder}/model", args.device) as (address, server):
        actor = make_actor(f"{folder}/model")
        for case in CASES:
            if args.case in (None, case.name):
                found = measure(case, actor, address, server, folder, rounds=args.rounds, steps=args.steps)
                report(args, found, described)
        actor.destroy()


@contextmanager
def served(model: str, device: str = "cpu", threads: int = 1) -> Iterator[tuple[str, psutil.Process]]:
    """Serve a model in another process; the tiny one is made if there is none."""
    if not Path(model).exists():
        write_tiny(model)
    with hold_port() as held:
        port = str(port_of(held))
    command = [sys.executable, "-m", "arealite.server", "--model-path", model, "--port", port, "--slots", "128"]
    command += ["--device", device, "--threads", str(threads)]
    ours = os.getpid()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=lambda: die_with_parent(ours))
    try:
        yield f"127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def configured(model: str, *overrides: str, case: Case = CASES[0]) -> GRPOConfig:
    """Return the CPU config of the GRPO example."""
    arguments = ["--config", str(CONFIG), f"actor.path={model}", *overrides]
    if torch.cuda.is_available():  # NCCL has no group of two processes on one GPU
        arguments.append("rollout.weight_update=disk")
    return load_expr_config(
        [*arguments, f"gconfig.n_samples={case.group}", f"train_dataset.batch_size={case.prompts}"], GRPOConfig
    )[0]


def make_actor(model: str, *overrides: str) -> FSDPPPOActor:
    """Return the policy that all rounds train on."""
    actor = FSDPPPOActor(configured(model, *overrides).actor)
    actor.initialize(None, FinetuneSpec(1, 10**6, CASES[0].prompts))
    return actor


def measure(
    case: Case, actor: FSDPPPOActor, address: str, server: psutil.Process, folder: str, *, rounds: int, steps: int
) -> dict[str, Any]:
    """Alternate between the modes, and return rates, their ratios and where the time went."""
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in MODES if number % 2 else MODES[::-1]:
            config = configured(
                f"{folder}/model",
                f"async_training={str(mode == 'asynchronous').lower()}",
                f"rollout.server_addrs=[{address}]",
                f"cluster.fileroot={folder}",
                f"trial_name={case.name}-{mode}-{number}",
                case=case,
            )
            found[mode].append(train(case, config, actor, server, steps=steps))
    each = [fast["steps_per_s"] / slow["steps_per_s"] for slow, fast in zip(*found.values(), strict=True)]
    means = {
        mode: {key: round(statistics.median(one[key] for one in ones), 4) for key in ones[0]}
        for mode, ones in found.items()
    }
    return {
        "case": case.name,
        "steps": steps,
        "ratios": each,
        "ratio": statistics.median(each),
        **means,
    }


def train(
    case: Case,
    config: GRPOConfig,
    actor: FSDPPPOActor,
    server: psutil.Process,
    *,
    steps: int,
    warm_up: int = WARM_UP,
    on_batch: Callable[[TensorDict], object] = lambda batch: None,
) -> dict[str, float]:
    """Train some steps with a rollout engine of their own, and return rate and shares of those after the warm-up."""
    rollout = RemoteInferenceEngine(config.rollout)
    rollout.initialize(None, None)
    workflow = GivenLengths(case, config.gconfig, load_hf_tokenizer(config.tokenizer_path))
    loader, clock, spent = batches(case), workflow.clock, Counter[str]()
    try:
        version = actor.get_version()
        publish_weights(actor, rollout, version=version)
        for step in range(warm_up + steps):
            if step == warm_up:
                spent.clear()
                began, began_cpu, began_clock = time.perf_counter(), cpu_s(server), clock.seconds.copy()
                began_trainer = time.process_time()
            with timed(spent, "rollout"):
                batch = rollout.prepare_batch(loader, workflow)
            with timed(spent, "train"):
                if config.actor.proximal == "recompute":
                    batch["proximal_logprobs"] = actor.compute_logprobs(batch)
                actor.compute_advantages(batch)
                actor.ppo_update(batch)
            with timed(spent, "weights"):
                publish_weights(actor, rollout, version=version + step + 1)
            on_batch(batch)
        wall_s, server_s = time.perf_counter() - began, cpu_s(server) - began_cpu
        trainer_s = time.process_time() - began_trainer
    finally:
        rollout.destroy()
    shares = {name: seconds / wall_s for name, seconds in spent.items()}
    clocked = {name: seconds - began_clock[name] for name, seconds in clock.seconds.items()}
    if tools_s := clocked.get("tools"):
        shares |= {name: clocked[name] / tools_s for name in ("starved", "requests")}
    return {"steps_per_s": steps / wall_s, "server": server_s / wall_s, "trainer": trainer_s / wall_s, **shares}


@contextmanager
def timed(spent: Counter[str], name: str) -> Iterator[None]:
    """Add the seconds that this takes."""
    began = time.perf_counter()
    yield
    spent[name] += time.perf_counter() - began


def batches(case: Case) -> list[list[dict[str, Any]]]:
    """Return prompts with the lengths of their runs, always the same."""
    draw = random.Random(1)
    messages = [{"role": "user", "content": "What is x?"}]
    return [
        [{"messages": messages, "lengths": [case.length(draw) for _ in range(case.group)]} for _ in range(case.prompts)]
        for _ in range(BATCHES)
    ]


def cpu_s(process: psutil.Process) -> float:
    """Return the seconds of CPU that a process has taken."""
    times = process.cpu_times()
    return float(times.user + times.system)


def described(result: dict[str, Any]) -> str:
    """Return the ratio, its spread, and where the time goes, as text."""
    low, high = min(result["ratios"]), max(result["ratios"])
    lines = [
        f"{result['case']:9} asynchronous is {result['ratio']:.2f} times as fast ({low:.2f} to {high:.2f}, "
        f"{len(result['ratios'])} rounds; {result['cores']} cores, load {result['load']})"
    ]
    for mode in MODES:
        shares = dict(result[mode])
        text = ", ".join(
            f"{name} {value:.1f}" if name == "requests" else f"{name} {value:.0%}"
            for name, value in shares.items()
            if name != "steps_per_s"
        )
        lines.append(f"{'':9} {mode:12} {shares['steps_per_s']:.2f} steps/s; {text}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
