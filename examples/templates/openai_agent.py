"""GRPO of an unmodified agent on OpenAI's package, which gets a base URL and a key.

    python3 -m arealite.launcher.local train.py --config config.yaml key=value ...

The agent's requests are a run, and the returned number is the run's reward.
"""

import sys
from typing import Any, cast

import loop
from openai import AsyncOpenAI

from arealite.agent.workflow import AgentWorkflow
from arealite.api.cli_args import GenerationHyperparameters, GRPOConfig
from arealite.reward import load_rewards


def make_workflow(config: GRPOConfig, gconfig: GenerationHyperparameters, tokenizer: Any) -> AgentWorkflow:
    rewards = load_rewards(config.reward)

    async def solve(data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> float:
        """Answer, review the answer once, and return the reward of the second answer."""
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages: list[Any] = [{"role": "user", "content": data["question"]}]
        for _ in range(2):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            text = reply.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Check and answer again."}]
        scores = [weight * cast(float, score(completions=text, **data)) for score, weight in rewards.items()]
        return sum(scores)

    return AgentWorkflow(solve, gconfig, tokenizer, config=config.agent)


if __name__ == "__main__":
    loop.main(sys.argv[1:], make_workflow)
