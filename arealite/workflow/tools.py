"""Tools: the model calls functions, reads what they return, and answers; the answer is scored.

The model sees a function's name, type hints and docstring. Calls of one answer run concurrently, each with a deadline,
and do not delay the generation of other runs.
"""

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import torch
from tensordict import TensorDict
from transformers.utils import get_json_schema

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.env_api import Environment
from arealite.api.errors import ConfigError, EnvError
from arealite.api.reward_api import RewardFunction
from arealite.chat.template import Message
from arealite.utils.background import in_thread
from arealite.workflow.conversation import ChatModel, Conversation
from arealite.workflow.rlvr import RLVRWorkflow
from arealite.workflow.trajectory import sample_group

Tool = Callable[..., Any]


class FunctionTools(Environment):
    """Functions as tools: coroutine functions are awaited, others run in threads."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.__name__: tool for tool in tools}
        if len(self._tools) < len(tools) or not tools:
            raise ConfigError(
                f"tools must have names of their own: got {[tool.__name__ for tool in tools]}. Rename one."
            )
        self._schemas = [get_json_schema(tool) for tool in tools]

    def list_tools(self) -> list[dict[str, Any]]:
        return self._schemas

    async def aexecute(self, tool_name: str, tool_args: dict[str, Any]) -> Any:
        """Call a tool. ValueError is the model's mistake: an unknown tool, or wrong arguments."""
        if tool_name not in self._tools:
            raise ValueError(f"{tool_name!r} is not a tool. There are: {', '.join(self._tools)}.")
        tool = self._tools[tool_name]
        try:
            inspect.signature(tool).bind(**tool_args)
        except TypeError as error:
            raise ValueError(f"{tool_name}: {error}.") from error
        if inspect.iscoroutinefunction(tool):
            return await tool(**tool_args)
        return await in_thread(lambda: tool(**tool_args))


class ToolWorkflow(RLVRWorkflow):
    """Answers `data["messages"]` with tools: each answer that calls some is followed by their results.

    `tools` are typed functions, or a function of the row that makes an `Environment`, for tools with a state. One that
    raises ValueError tells the model its mistake; another error, or a timeout of `tool_timeout` seconds, is an EnvError
    that fails the episode. Metrics: `workflow/num_turns`, `workflow/tool_calls`, `workflow/refused_calls` (ValueError)
    and `workflow/malformed_calls`, which stay text.
    """

    def __init__(
        self,
        reward_fn: RewardFunction | dict[RewardFunction, float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        tools: Sequence[Tool] | Callable[[dict[str, Any]], Environment],
        *,
        max_turns: int = 8,
        tool_timeout: float = 30.0,
        enable_thinking: bool = False,
        **rewards: Any,
    ) -> None:
        """`rewards` are `reward_timeout` and `num_reward_workers`, as in RLVRWorkflow."""
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1: got {max_turns}. Use 8.")
        super().__init__(reward_fn, gconfig, tokenizer, enable_thinking=enable_thinking, **rewards)
        self.max_turns, self.tool_timeout = max_turns, tool_timeout
        self.model = ChatModel(tokenizer, enable_thinking=enable_thinking)
        self.model.require_calls()
        if callable(tools):
            self.make_environment = tools
        else:
            functions = FunctionTools(tools)
            self.make_environment = lambda _: functions

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> TensorDict:
        """Run the group of one prompt."""
        return await sample_group(lambda sample: self._run(engine, data, sample), self.gconfig.n_samples)

    async def _run(self, engine: InferenceEngine, data: dict[str, Any], sample: int) -> TensorDict:
        counts: Counter[str] = Counter()
        environment = self.make_environment(data)
        async with AsyncExitStack() as cleanup:
            cleanup.push_async_callback(lambda: self._within("aclose", environment.aclose()))
            await self._within("ainitialize", environment.ainitialize())
            talk = Conversation(engine, self.model, self.gconfig, sample=sample, tools=environment.list_tools())
            messages = data["messages"]
            while (answer := await talk.ask(messages)) is not None:
                calls = answer.get("tool_calls")
                if not calls or talk.num_turns == self.max_turns:
                    break
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._call(environment, call, counts)) for call in calls]
                messages = [task.result() for task in tasks]
        reward, each = await self.score(talk.response, data)
        counts.update(num_turns=talk.num_turns, malformed_calls=talk.counts["malformed_calls"])
        metrics = {name: torch.tensor([float(counts[name])]) for name in _METRICS}
        return talk.builder.finish(reward, sample_index=sample).update({**each, **metrics})

    async def _call(self, environment: Environment, call: Message, counts: Counter[str]) -> Message:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        counts["tool_calls"] += 1
        try:
            result = await self._within(name, environment.aexecute(name, arguments))
        except ValueError as error:
            counts["refused_calls"] += 1
            result = f"Error: {error}"
        try:
            content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise EnvError(f"tool {name} must return what JSON can hold: got {error}. Return a str.") from error
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}

    async def _within(self, name: str, call: Any) -> Any:
        try:
            async with asyncio.timeout(self.tool_timeout):
                return await call
        except (ValueError, EnvError):
            raise
        except TimeoutError as error:
            raise EnvError(
                f"tool {name} must return within tool_timeout = {self.tool_timeout:g} s: it did not. Make it faster."
            ) from error
        except Exception as error:
            raise EnvError(
                f"tool {name} must raise nothing but ValueError: got {type(error).__name__}: {error}. Fix the tool, or "
                "raise ValueError to tell the model."
            ) from error


_METRICS = ("num_turns", "tool_calls", "refused_calls", "malformed_calls")
