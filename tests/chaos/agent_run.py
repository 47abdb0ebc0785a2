"""The run of agents that faults are injected into, started by the launcher; only its workflow is not that of examples.

`asked.jsonl`, beside the runs, has a line for each attempt that ended well: what servers had returned of each of its
runs, written down before the proxy saw it, and the ids of the answers that clients have read.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "agents"))

import loop
from tensordict import TensorDict

from arealite.agent.session import Session
from arealite.agent.workflow import AgentWorkflow
from arealite.api.cli_args import AgentConfig, GenerationHyperparameters, GRPOConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import ModelRequest, ModelResponse
from arealite.api.workflow_api import RolloutWorkflow
from arealite.reward import load_rewards
from arealite.rollout.prompts import current_episode
from arealite.workflow.rlvr import RLVRWorkflow
from chaos.agents import READ, agent


class Recorded(InferenceEngine):
    """The engine of one attempt, which writes down what it has returned."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self.written: dict[int, tuple[ModelResponse, str]] = {}
        self.runs: dict[int, dict[str, Any]] = {}
        """What is known of each run of the group when it has ended."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        response = await self._engine.agenerate(req)
        names = ("input_tokens", "output_tokens", "output_logprobs", "output_versions", "stop_reason", "num_interrupts")
        self.written[id(response)] = response, json.dumps({name: getattr(response, name) for name in names})
        return response


Recorded.__abstractmethods__ = frozenset()  # the proxy asks for nothing else


class RecordedAgents(AgentWorkflow):
    """Agents that misbehave, with a record of what they were told."""

    def __init__(self, *args: Any, asked: Path, **options: Any) -> None:
        super().__init__(agent, *args, **options)
        self._asked = asked

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict | None:
        episode, recorded = current_episode.get(), Recorded(engine)
        assert episode is not None
        row = data | {"attempt": episode.attempt, "runs": itertools.count()}
        batch = await super().arun_episode(recorded, row)
        if batch is not None:
            line = {"prompt_id": str(data["prompt_id"]), "attempt": episode.attempt, "runs": recorded.runs}
            with self._asked.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return batch

    def _rows(self, session: Session, reward: Any, sample: int) -> TensorDict:
        recorded: Any = session.engine
        recorded.runs[sample] = {
            "counts": {name: session.counts[name] for name in ("retries", "orphans")},
            "turns": [turn.id for turn in session.run.turns],
            "read": READ.pop(session.key, []),
            "responses": [json.loads(recorded.written[id(turn.response)][1]) for turn in session.run.turns],
        }
        return super()._rows(session, reward, sample)


def make_workflow(config: GRPOConfig, gconfig: GenerationHyperparameters, tokenizer: Any) -> RolloutWorkflow:
    """Return the workflow of training; that of evaluations has no agents."""
    if gconfig is not config.gconfig:
        return RLVRWorkflow(load_rewards(config.reward), gconfig, tokenizer)
    settings = AgentConfig(retry_grace=1.0, heartbeat_s=0.1)
    return RecordedAgents(gconfig, tokenizer, config=settings, asked=Path(config.cluster.fileroot) / "asked.jsonl")


if __name__ == "__main__":
    loop.main(sys.argv[1:], make_workflow)
