"""What agents behind the proxy cost: a thousand runs at once of some turns each, against a server that costs nothing.

    python benchmarks/agents.py [--runs 1024] [--turns 4] [--delay 8] [--client openai] [--json] [--out FILE]

The server is a real HTTP server on loopback, in another process, that answers 64 canned tokens after a delay. All else
is what trains: episodes, proxy, bridge with a real tokenizer, rows. Each turn asks with the whole conversation. The
agents run in this process; their client is what a user brings: `openai` with the shared connections that an agent is
given, or `aiohttp`. CPU time is reported by thread: `arealite-agents` is that of the agents and their client.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import torch
from circumstances import options, report
from model_configs import write_tiny
from runtime_overhead import cpu_by_thread, served, watched

from arealite.agent.workflow import AgentWorkflow
from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.hf import load_hf_tokenizer


class Talk:
    """The agent: asks in turn, always with all that was said; counts what runs at once."""

    def __init__(self, num_turns: int) -> None:
        self.num_turns = num_turns
        self.num_running = self.most_running = 0
        self.lock = threading.Lock()

    async def __call__(self, data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> float:
        """Run once, with OpenAI's package."""
        import openai

        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)

        async def ask(messages: list[Any]) -> Any:
            answer = await client.chat.completions.create(model="policy", messages=messages)
            return answer.choices[0].message.content

        return await self.talk(ask)

    async def talk(self, ask: Callable[[list[Any]], Any]) -> float:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        messages: list[Any] = []
        for turn in range(self.num_turns):
            messages.append({"role": "user", "content": f"What is {turn} + {turn}?"})
            messages.append({"role": "assistant", "content": await ask(messages)})
        self.num_running -= 1
        return 1.0


class PlainTalk(Talk):
    """The same agent on aiohttp alone."""

    session: aiohttp.ClientSession | None = None

    async def __call__(self, data: dict[str, Any], base_url: str, api_key: str) -> float:  # type: ignore[override]
        """Run once."""
        if self.session is None:
            self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

        async def ask(messages: list[Any]) -> Any:
            assert self.session is not None
            headers, body = {"Authorization": f"Bearer {api_key}"}, {"model": "policy", "messages": messages}
            async with self.session.post(f"{base_url}/chat/completions", json=body, headers=headers) as reply:
                return (await reply.json())["choices"][0]["message"]["content"]

        return await self.talk(ask)


CLIENTS = {"aiohttp": PlainTalk, "openai": Talk}


def main() -> None:
    """Measure each client and print one line each."""
    parser = options(__doc__)
    parser.add_argument("--runs", type=int, default=1024, help="at once")
    parser.add_argument("--turns", type=int, default=4, help="of each run")
    parser.add_argument("--delay", type=float, default=8.0, help="of an answer, in seconds, give or take a third")
    parser.add_argument("--client", choices=CLIENTS, action="append", help="only this one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for client in args.client or CLIENTS:
        report(args, measure(client, args.runs, args.turns, args.delay), described)


def described(result: dict[str, Any]) -> str:
    """Return a result as text."""
    shares = ", ".join(f"{name} {cpu_ms:.2f}" for name, cpu_ms in result["cpu_ms_by_thread"].items())
    return (
        f"{result['client']:8} {result['most_running']:5} runs at once, {result['turns_per_s']:5.0f} turns/s, "
        f"{result['cpu_ms']:5.2f} ms of CPU per turn; lag p99 {result['lag_p99_ms']:.1f} ms "
        f"({result['cores']} cores, load {result['load']})\n"
        f"{'':8} ms by thread: {shares}"
    )


def measure(client: str, num_runs: int, num_turns: int, delay_s: float) -> dict[str, Any]:
    """Let every run end once."""
    agent = CLIENTS[client](num_turns)
    with tempfile.TemporaryDirectory() as folder, served(delay_s) as address:
        write_tiny(f"{folder}/model")
        tokenizer = load_hf_tokenizer(f"{folder}/model")
        workflow = AgentWorkflow(agent, GenerationHyperparameters(n_samples=1, max_new_tokens=64), tokenizer)
        config = InferenceEngineConfig(
            experiment_name="agents",
            trial_name=client,
            fileroot=folder,
            server_addrs=[address],
            consumer_batch_size=num_runs,
            max_concurrent_rollouts=num_runs,
        )
        engine = RemoteSGLangEngine(config)
        engine.initialize(None, None)
        try:
            engine.rollout_batch([{}], workflow)  # what is made once
            with watched(engine, is_profiled=False) as lags:
                began, began_cpu = time.perf_counter(), cpu_by_thread()
                batch = engine.rollout_batch([{} for _ in range(num_runs)], workflow)
                cpu, wall_s = cpu_by_thread() - began_cpu, time.perf_counter() - began
        finally:
            engine.destroy()
            workflow.close()
    count = num_runs * num_turns
    assert int(batch["agent/turns"].sum()) == count and batch.batch_size[0] == num_runs, "one row per run"
    lags.sort()
    return {
        "client": client,
        "runs": num_runs,
        "turns": num_turns,
        "delay_s": delay_s,
        "most_running": agent.most_running,
        "turns_per_s": count / wall_s,
        "cpu_ms": 1e3 * cpu.total() / count,
        "cpu_ms_by_thread": {name: 1e3 * cpu_s / count for name, cpu_s in cpu.most_common(6)},
        "lag_p99_ms": 1e3 * lags[int(0.99 * len(lags))],
    }


if __name__ == "__main__":
    main()
