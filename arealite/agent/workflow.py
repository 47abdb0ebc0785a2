"""Trains an agent that speaks HTTP as OpenAI's or Anthropic's packages do, unmodified and token-exact.

    async def solve(data, base_url, api_key):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...
        return float(answer == data["answer"])

    workflow = AgentWorkflow(solve, gconfig, tokenizer)

A group is `gconfig.n_samples` *runs* of the agent, each with its own key. The turns of a run form a tree, and its rows
are the paths of that tree: each sampled token is trained on in exactly one row.
"""

# b rows of a run

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from tensordict import TensorDict

from arealite.agent.bridge import Bridge
from arealite.agent.launch import Agent, Endpoint, agent_of
from arealite.agent.server import Proxy
from arealite.agent.session import Model, Session
from arealite.agent.turns import Branch, Run, Turn
from arealite.api.cli_args import AgentConfig, GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import AgentError
from arealite.api.workflow_api import RolloutWorkflow
from arealite.chat.answer import MalformedKind
from arealite.chat.demonstration import stopping
from arealite.utils.background import DaemonThreads, gathered
from arealite.utils.tensors import concat_padded_tensors


class AgentWorkflow(RolloutWorkflow):
    """Runs an agent `gconfig.n_samples` times per row, behind a proxy that acts as the model's server.

    `run` is an `async def`, a plain function (run in another process) or a command (a string for the shell, or a list).
    A function receives the arguments that it names: `data`, `base_url`, `api_key`, `untrained_key` and, for coroutines,
    `http_client`. A command gets the row as JSON on stdin and OPENAI_* and ANTHROPIC_* in its environment, and prints
    its reward as the last line. A reward is a number, a mapping of response ids to numbers (the run's reward is their
    sum, and `turn_rewards` assigns them to turns), or None, which rejects the episode.
    """

    def __init__(
        self,
        run: Agent | Callable[..., Any] | str | Sequence[str],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        turn_discount: float = 1.0,
        *,
        config: AgentConfig | None = None,
        enable_thinking: bool = False,
        num_processes: int = 16,
    ) -> None:
        """`num_processes` bounds the processes of a function or command. Raises ConfigError or ValueError."""
        self.gconfig, self.tokenizer, self.config = gconfig, tokenizer, config or AgentConfig()
        self.turn_discount = turn_discount
        self._agent = agent_of(run, num_processes=num_processes)
        self._model = model_of(gconfig, tokenizer, self.config, enable_thinking=enable_thinking)
        self._proxy: Proxy | None = None

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict | None:
        """Run the agent on one row, once per sample of the group."""
        if self._proxy is None:
            self._proxy = Proxy(heartbeat_s=self.config.heartbeat_s)  # takes a moment, once
        rows = await gathered(self._run(engine, data, sample) for sample in range(self.gconfig.n_samples))
        accepted = [row for row in rows if row is not None]
        return concat_padded_tensors(accepted) if len(accepted) == len(rows) else None

    def close(self) -> None:
        """Close the proxy and end the agents' loop and processes."""
        self._agent.close()
        if self._proxy is not None:
            self._proxy.close()
        self._model.tokenizing.shutdown()

    async def _run(self, engine: InferenceEngine, data: dict[str, Any], sample: int) -> TensorDict | None:
        """Return the rows of one run, or None if its reward rejects it."""
        assert self._proxy is not None
        async with self._agent.key() as key:
            session = Session(engine, self._model, seed_key=str(sample), key=key)
            try:
                await self._proxy.open(session)
                reward = await self._reward(session, data)
            finally:
                await asyncio.shield(self._proxy.end(session))
        return None if reward is None else await session.tokenized(self._rows, session, reward, sample)

    def _rows(self, session: Session, reward: Any, sample: int) -> TensorDict:
        return rows_of(session, reward, sample, self.turn_discount)

    async def _reward(self, session: Session, data: dict[str, Any]) -> Any:
        """Run the agent until it or its episode ends, and return its reward."""
        assert self._proxy is not None
        endpoint = Endpoint(self._proxy.address, session.key, session.untrained_key)
        agent = asyncio.ensure_future(self._agent.run(dict(data), endpoint))
        try:
            await asyncio.wait({agent, session.failure}, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                session.failure.result()
            return agent.result()
        except Exception:
            if session.limit is None or session.failure.done():
                raise
            return None if self.config.on_limit == "reject" else 0.0
        finally:
            agent.cancel()
            await asyncio.wait({agent})  # until its processes are gone


def model_of(
    gconfig: GenerationHyperparameters, tokenizer: Any, config: AgentConfig, *, enable_thinking: bool
) -> Model:
    """Return the shared state of all runs, with a thread for the tokenizer."""
    bridge = Bridge(tokenizer, history=config.history, enable_thinking=enable_thinking)
    return Model(bridge, tokenizer, stopping(gconfig, tokenizer), config, DaemonThreads(1, "agent-tokenizer"))


def rows_of(session: Session, reward: Any, sample: int, turn_discount: float) -> TensorDict:
    """Return the rows of an ended run (in the tokenizer's thread). Raises AgentError or TrajectoryError."""
    run, counts = session.run, session.counts
    total, by_turn = as_rewards(reward, run)
    _choose_roots(run, session.model.config.train_roots)
    rows = run.rows(total, by_turn, turn_discount=turn_discount, sample_index=sample)
    metrics = {
        "turns": len(run.turns),
        "rows": len(rows),
        "retries": counts["retries"],
        "orphans": counts["orphans"],
        "limited": session.limit is not None,
        "malformed_calls": run.counts["malformed_calls"],
        **{f"malformed_calls_{kind}": run.counts[f"malformed_calls_{kind}"] for kind in get_args(MalformedKind)},
        **{f"branch_{reason}": run.branches[reason] for reason in get_args(Branch)},
    }
    return rows.update({f"agent/{name}": torch.full(rows.batch_size, float(n)) for name, n in metrics.items()})


def as_rewards(reward: Any, run: Run) -> tuple[float, dict[str, float]]:
    """Return the reward of a run and the rewards of its turns by id. Raises AgentError."""
    by_turn = reward if isinstance(reward, Mapping) else {}
    numbers = list(by_turn.values()) if isinstance(reward, Mapping) else [reward]
    try:
        numbers = [float(number) for number in numbers]
        total = math.fsum(numbers)
    except (TypeError, ValueError, OverflowError):
        total = math.nan
    if not math.isfinite(total):
        raise AgentError(
            f"an agent must return a finite number, numbers by the id of a response, or None: got {reward!r:.200}. "
            "Return its reward."
        )
    if unknown := [name for name in by_turn if name not in run.by_id]:
        raise AgentError(f"rewards must be for responses of the run: got one for {unknown[0]!r}. Use the `id` of one.")
    return total, dict(zip(by_turn, numbers))


def _choose_roots(run: Run, which: str) -> None:
    """Apply `train_roots`: keep all conversations, the first, or the longest."""
    sampled: Counter[Turn] = Counter()
    roots: dict[Turn, Turn] = {}
    for turn in run.turns:  # parents precede children
        roots[turn] = turn if turn.parent is None else roots.get(turn.parent, turn)
        if turn.is_trained:
            sampled[roots[turn]] += turn.response.output_len
    if which == "all" or not sampled:
        return
    chosen = next(iter(sampled)) if which == "first" else sampled.most_common(1)[0][0]
    for turn in run.turns:
        turn.is_trained &= roots[turn] is chosen
