"""Agents on real packages learn, token-exactly: `python -m trained_agents`, with `tests` on the path.

Each agent trains a tiny model asynchronously through a real `lite` server. What the engine returned is recorded beside
the proxy, and every row that the workflow returns is audited against it. Ends with `RESULT {json}`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import testing_forks
import torch
from tensordict import TensorDict
from testing_row_audit import audit_turns, unpadded

from arealite.agent.session import Session
from arealite.agent.workflow import AgentWorkflow
from arealite.api.cli_args import (
    AgentConfig,
    GenerationHyperparameters,
    InferenceEngineConfig,
    OptimizerConfig,
    PPOActorConfig,
    WeightCheckConfig,
)
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import FinetuneSpec, ModelRequest, ModelResponse
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.server import __main__ as server
from arealite.utils.hf import load_hf_tokenizer
from arealite.utils.network import hold_port, port_of
from arealite.weights.publish import publish_weights
from trained_agents import agents_on_packages
from trained_agents.painter import write_painter

STEPS, PROMPTS, SAMPLES = 20, 8, 4
MIN_RISE = 0.15
AT_THE_ENDS = 2
"""Steps that the reward before and after is the mean of."""
COMMAND = [sys.executable, "-I", str(Path(__file__).with_name("command.py"))]
AGENTS: dict[str, Callable[..., Any] | list[str]] = {
    "openai": agents_on_packages.on_openai,
    "anthropic": agents_on_packages.on_anthropic,
    "openai-agents": agents_on_packages.on_openai_agents,
    "command": COMMAND,
}


class Recorded(InferenceEngine):
    """The engine of one episode, which remembers what it has returned."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self.responses: list[ModelResponse] = []
        self.kept: list[ModelResponse] = []
        """Those that a client got."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        response = await self._engine.agenerate(req)
        self.responses.append(response)
        return response


Recorded.__abstractmethods__ = frozenset()  # the proxy asks for nothing else


class AuditedWorkflow(AgentWorkflow):
    """Audits the rows of every episode."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict | None:
        recorded = Recorded(engine)
        batch = await super().arun_episode(recorded, data)
        assert batch is not None, "these agents reject nothing"
        kept = set(map(id, recorded.kept))
        trained = [one for one in recorded.responses if id(one) in kept]
        audit = audit_turns(unpadded(batch), trained)
        self.counts["never_got"] += len(recorded.responses) - len(trained)
        self.problems += audit.problems
        self.counts["turns"] += audit.num_turns
        self.counts["equal"] += audit.num_equal
        self.counts["interrupted"] += sum(one.num_interrupts > 0 for one in trained)
        self.counts["mixed_versions"] += sum(len(set(one.output_versions)) > 1 for one in trained)
        return batch

    def _rows(self, session: Session, reward: Any, sample: int) -> TensorDict:
        session.engine.kept += [turn.response for turn in session.run.turns]  # type: ignore[attr-defined]
        self.counts.update(retries=session.counts["retries"], orphans=session.counts["orphans"])
        rows = super()._rows(session, reward, sample)
        self.counts["runs_of_several_rows"] += rows.batch_size[0] > 1
        return rows


def train(name: str, model: str, folder: Path) -> dict[str, Any]:
    """Train one agent, and return what was measured."""
    began = time.monotonic()
    tokenizer = load_hf_tokenizer(model)
    gconfig = GenerationHyperparameters(n_samples=SAMPLES, max_new_tokens=48)
    workflow = AuditedWorkflow(AGENTS[name], gconfig, tokenizer, config=AgentConfig(max_turns=20))
    with contextlib.ExitStack() as stack:
        stack.callback(workflow.close)
        port = port_of(stack.enter_context(hold_port()))
        argv = ["--model-path", model, "--port", str(port), "--context", "512", "--weight-version", "0"]
        process = testing_forks.start(server.main, argv)
        stack.callback(process.join)
        stack.callback(process.kill)
        actor = FSDPPPOActor(
            PPOActorConfig(
                path=model,
                dtype="float32",
                group_size=SAMPLES,
                baseline="none",  # what succeeded is reinforced, and a model that small is pushed away from nothing
                adv_norm=False,
                ppo_n_minibatches=1,
                optimizer=OptimizerConfig(lr=5e-3, eps=1e-2, weight_decay=0.0, warmup_steps_proportion=0.0),
            )
        )
        actor.initialize(None, FinetuneSpec(1, STEPS * PROMPTS, PROMPTS))
        stack.callback(actor.destroy)
        rollout = RemoteInferenceEngine(
            InferenceEngineConfig(
                experiment_name="agents",
                trial_name=name,
                fileroot=str(folder),
                backend="lite",
                server_addrs=[f"127.0.0.1:{port}"],
                consumer_batch_size=PROMPTS,
                max_head_offpolicyness=2,
                setup_timeout=120,
                tokenizer_path=model,
                weight_check=WeightCheckConfig(canary_tokens=0),
            )
        )
        rollout.initialize(None, None)
        stack.callback(rollout.destroy)
        publish_weights(actor, rollout, version=0)
        loader = [[{"room": room} for room in range(100)]]
        rewards = []
        for step in range(STEPS):
            batch = rollout.prepare_batch(loader, workflow)
            runs = zip(*(batch[key].tolist() for key in ("group_index", "sample_index", "rewards")))
            by_run = {(group, sample): reward for group, sample, reward in runs}
            rewards.append(sum(by_run.values()) / len(by_run))
            batch["proximal_logprobs"] = actor.compute_logprobs(batch)
            actor.compute_advantages(batch)
            actor.ppo_update(batch)
            publish_weights(actor, rollout, version=step + 1)
    print(f"{name:13} rewards by step: {[round(reward, 2) for reward in rewards]}", flush=True)
    before, after = (sum(ends) / AT_THE_ENDS for ends in (rewards[:AT_THE_ENDS], rewards[-AT_THE_ENDS:]))
    counts = workflow.counts
    measured = {"reward_before": round(before, 3), "reward_after": round(after, 3), "problems": workflow.problems[:5]}
    return {**counts, **measured, "seconds": round(time.monotonic() - began)}


def main() -> int:
    """Train all agents, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", choices=AGENTS, action="append", help="only this one")
    parser.add_argument("--model", help="folder of a model that was made before; else it is made")
    args = parser.parse_args()
    torch.set_num_threads(1)
    failures, results = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or write_painter(Path(scratch) / "model")
        for name in args.agent or AGENTS:
            result = results[name] = train(name, model, Path(scratch))
            print(f"{name:13} {json.dumps(result)}", flush=True)
            if result["equal"] != result["turns"] or result["problems"]:
                failures.append(f"{name}: trained ids must be those that were sampled: got {result['problems']}")
            if result["reward_after"] < result["reward_before"] + MIN_RISE:
                failures.append(f"{name}: the reward must rise by {MIN_RISE}")
    total = sum((Counter({k: v for k, v in one.items() if isinstance(v, int)}) for one in results.values()), Counter())
    for what in ("interrupted", "retries", "orphans", "runs_of_several_rows") if not args.agent else ():
        if not total[what]:
            failures.append(f"{what} must occur: got none")
    summary = {
        "agents": list(results),
        **{
            key: total[key]
            for key in (
                "turns",
                "retries",
                "orphans",
                "interrupted",
                "mixed_versions",
                "runs_of_several_rows",
            )
        },
        "ids_equal": total["equal"] / max(1, total["turns"]),
        **{key: {name: one[key] for name, one in results.items()} for key in ("reward_before", "reward_after")},
        "failures": failures,
    }
    print(f"RESULT {json.dumps(summary)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
