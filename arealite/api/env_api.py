"""What an agent acts in: tools with asynchronous calls, and environments with steps, as gymnasium has them."""

import abc
from typing import Any


class Environment(abc.ABC):
    """A stateful environment of one episode."""

    async def ainitialize(self) -> None:  # noqa: B027
        """Acquire what the environment needs."""

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of the tools."""
        return []

    @abc.abstractmethod
    async def aexecute(self, tool_name: str, tool_args: dict[str, Any]) -> Any:
        """Run a tool and return its result."""

    async def aclose(self) -> None:  # noqa: B027
        """Release what `ainitialize` acquired."""


class Agent(abc.ABC):
    """Translates between a model and an environment with steps. One object serves all runs: it keeps no state."""

    @abc.abstractmethod
    def observe(self, observation: Any, info: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages that describe an observation to the model, `{"role", "content"}`."""

    @abc.abstractmethod
    def act(self, message: dict[str, Any]) -> Any:
        """Return the action in a model's answer; Raises ParseError without one; the model gets its text."""
