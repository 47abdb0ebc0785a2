"""Names of OpenEnv servers: `openenv:http://HOST:PORT?tasks=256&option=value`, in place of the path of a data set."""

import re
from urllib.parse import parse_qsl

import yaml
from pydantic import ValidationError

from arealite.api.config.data import OPENENV
from arealite.api.config.types import ConfigBase, NonNegativeInt, Positive, PositiveInt, rule_of
from arealite.api.errors import ConfigError


class OpenEnvServer(ConfigBase, extra="allow"):
    """A server and the options after its address; all others are keywords of the environment's `reset`."""

    address: str
    """Of HTTP, without a slash at its end."""
    tasks: PositiveInt = 1000
    """Number of rows, each with a seed of its own."""
    seed: NonNegativeInt = 0
    """Seed of the first row; each next one is one higher."""
    sessions: PositiveInt | None = None
    """Most episodes at once; None is any number."""
    step_timeout: Positive = 30.0
    """Seconds for a step, and for a connection with its reset."""
    action: str | None = None
    """`FILE.py:FUNCTION` from the model's text to an action; None: the text is the only field that the action needs."""
    observation: str | None = None
    """`FILE.py:FUNCTION` from an observation to a text; None: its only text, else all of it as JSON."""


def openenv_server(path: str) -> OpenEnvServer:
    """Read the name of a server. Raises ConfigError."""
    address, _, query = path.removeprefix(OPENENV).partition("?")
    if not (path.startswith(OPENENV) and re.fullmatch(r"https?://[^/\s]+\S*", address)):
        raise ConfigError(f"an OpenEnv server must be {OPENENV}http://HOST:PORT?option=value: got {path}. Correct it.")
    try:
        options = {key: yaml.safe_load(text) for key, text in parse_qsl(query, keep_blank_values=True)}
        return OpenEnvServer(**options | {"address": address.rstrip("/")})
    except ValidationError as error:
        problem = error.errors()[0]
        rule = f"{problem['loc'][0]} of {path} must be {rule_of(problem)}"
        raise ConfigError(f"{rule}: got {problem['input']!r}. Correct it.") from None
