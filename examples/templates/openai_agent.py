"""GRPO of an agent on the package of OpenAI, which trains as it is: it gets an address and a key.

    python3 -m arealite.launcher.local train.py --config config.yaml key=value ...

What the agent asks at that address is a run, and the number that it returns the run's reward.
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
        """Answer, look at the answer once more, and return what the second one earns."""
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
