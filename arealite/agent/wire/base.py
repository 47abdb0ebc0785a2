"""The base of all wire formats: a request becomes a `Call`, the turn that answers it an `Answer`.

A format parses the JSON body of a request and writes an answer as JSON or as events of a stream. Internal messages are
OpenAI's chat messages as chat templates expect them: `content` is a string (or parts, with images), arguments of tool
calls are a dict.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from arealite.agent.turns import Turn
from arealite.chat.template import read_arguments

T = TypeVar("T")
Message = dict[str, Any]

# Accepted and ignored: the experiment decides how completions are sampled.
_NOT_OBEYED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("response_format", "tool_choice", "top_logprobs", "reasoning", "reasoning_effort", "thinking", "output_config"),
)
_HARMLESS: tuple[Any, ...] = (None, "auto", 0, {"type": "auto"}, {"type": "text"}, {"type": "disabled"}, {})
_WITH_0 = ("temperature", "seed")  # parameters for which 0 is a valid value


class RefusedError(ValueError):
    """A request that gets an error, and that the client must not repeat unchanged."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass
class Call:
    """A parsed request."""

    body: dict[str, Any]
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    parent: str | None = None
    """Id of the turn that this request continues, if given."""
    wants_usage: bool = field(init=False)
    """Whether a stream ends with token counts."""

    def __post_init__(self) -> None:
        self.wants_usage = bool(read(self.body, "stream_options", dict, {}).get("include_usage"))

    @property
    def model(self) -> str:
        return str(self.body.get("model") or "policy")

    @property
    def not_obeyed(self) -> list[str]:
        """Return the names of ignored parameters."""
        given = {name: self.body.get(name) for name in _NOT_OBEYED}
        return [name for name, value in given.items() if value not in _HARMLESS or (value == 0 and name in _WITH_0)]


@dataclass(eq=False)
class Answer:
    """The turn that answers a call."""

    id: str
    created: int
    call: Call
    turn: Turn

    @property
    def num_input(self) -> int:
        return self.turn.response.input_len

    @property
    def num_output(self) -> int:
        return self.turn.response.output_len


Find = Callable[[str], Answer]
"""Returns an earlier answer of the run by its id; raises RefusedError."""


class Wire(ABC):
    """One format."""

    prefix: str
    """Prefix of the ids of its answers."""
    heartbeat: bytes = b": heartbeat\n\n"
    """Bytes that its clients ignore in a stream."""

    @abstractmethod
    def parse(self, body: dict[str, Any], find: Find) -> Call:
        """Parse a request. Raises RefusedError, or KeyError, TypeError, AttributeError for wrong shapes."""

    @abstractmethod
    def body(self, answer: Answer) -> dict[str, Any]:
        """Return the body of the whole answer."""

    @abstractmethod
    def events(self, answer: Answer) -> Iterator[bytes]:
        """Yield the answer as events of a stream."""

    def error(self, error: RefusedError) -> dict[str, Any]:
        """Return the body of an error."""
        kind = "invalid_request_error" if error.status == 400 else "conflict_error"
        return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}

    def error_event(self, error: RefusedError) -> bytes:
        """Return an error as an event of a stream."""
        return event(self.error(error))


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return one server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def read(body: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """Return a field of a request, or the default if it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise RefusedError(f"{name} must be of type {kind.__name__}: got {value!r:.100}. Correct the request.")
    return value


def read_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first given value of these token limits."""
    for name in names:
        if body.get(name) is not None:
            number = read(body, name, int, 0)
            if number < 1:
                raise RefusedError(f"{name} must be at least 1: got {number}. Correct the request.")
            return number
    return None


def read_stop(body: Mapping[str, Any], name: str) -> list[str]:
    """Return the given stop strings, one or several."""
    given = body.get(name) or []
    stop = [given] if isinstance(given, str) else given
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise RefusedError(f"{name} must be texts of at least one letter: got {given!r:.100}. Correct the request.")
    return stop


def refuse(body: Mapping[str, Any], *names: str) -> None:
    """Raise RefusedError for unsupported parameters that would change the meaning of an answer."""
    for name in names:
        if body.get(name):
            raise RefusedError(f"{name} must be left out: got {body[name]!r:.100}. It is not served here.")


def function_tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """Return a tool as chat templates expect it."""
    function = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function}


def own_tool(tool: Mapping[str, Any], function: Any) -> dict[str, Any]:
    """Return a tool of an OpenAI format; the formats differ in the place of `function`."""
    if tool.get("type") != "function":
        raise RefusedError(f"tools must be functions: got {tool.get('type')!r}. Leave out what the server would run.")
    return function_tool(function["name"], function.get("description"), function.get("parameters"))


def tool_call(call_id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Return a call as chat templates expect it; arguments that are no JSON object stay text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": read_arguments(arguments)}}


def arguments_text(call: Mapping[str, Any]) -> str:
    """Return the arguments of a canonical call as JSON."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def joined(content: Any, *, text_types: tuple[str, ...] = ("text",)) -> Any:
    """Return content as one string if it is only text, else as parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RefusedError(f"content must be a text or a list of parts: got {content!r:.100}. Correct the request.")
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    if all(part["type"] in text_types for part in parts):
        return "".join(part["text"] for part in parts)
    return [{"type": "text", "text": part["text"]} if part["type"] in text_types else part for part in parts]
