"""The callable that a worker process runs for an agent that is a plain function. Imports next to nothing."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Called:
    """Calls the agent with the variables of its run, once at a time."""

    function: Callable[..., Any]

    def __call__(self, env: Mapping[str, str], call: dict[str, Any]) -> Any:
        os.environ.update(env)
        return self.function(**call)
