"""What an agent acts in: tools with asynchronous calls."""

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
