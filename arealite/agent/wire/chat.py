"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from collections.abc import Iterator
from typing import Any

from arealite.agent.turns import Turn
from arealite.agent.wire import base
from arealite.agent.wire.base import Answer, Call, Find, Message, RefusedError, Wire


class Chat(Wire):
    prefix = "chatcmpl-"

    def parse(self, body: dict[str, Any], find: Find) -> Call:
        base.refuse(body, "functions", "function_call", "audio", "prediction", "logprobs")
        if body.get("n") not in (None, 1):
            raise RefusedError(f"n must be 1: got {body['n']!r:.100}. Send a request for each answer.")
        messages = [_canonical(message) for message in body["messages"]]
        if not messages:
            raise RefusedError("messages must have at least one message: got none. Send a user message.")
        return Call(
            body,
            messages,
            [base.own_tool(tool, tool.get("function") or {}) for tool in body.get("tools") or []] or None,
            max_tokens=base.read_limit(body, "max_completion_tokens", "max_tokens"),
            stop=base.read_stop(body, "stop"),
        )

    def body(self, answer: Answer) -> dict[str, Any]:
        choice = {"index": 0, "message": _message(answer.turn.message), "finish_reason": _finish_reason(answer.turn)}
        return _head(answer, "chat.completion") | {"choices": [choice | {"logprobs": None}], "usage": _usage(answer)}

    def events(self, answer: Answer) -> Iterator[bytes]:
        head = _head(answer, "chat.completion.chunk")
        wants_usage = answer.call.wants_usage
        no_usage = {"usage": None} if wants_usage else {}

        def chunk(finish_reason: str | None = None, **delta: Any) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
            return base.event(head | {"choices": [choice]} | no_usage)

        message = answer.turn.message
        yield chunk(role="assistant", content="")
        if reasoning := message.get("reasoning_content"):
            yield chunk(reasoning_content=reasoning)
        if message["content"]:
            yield chunk(content=message["content"])
        for number, call in enumerate(message.get("tool_calls") or []):
            function = {"name": call["function"]["name"], "arguments": ""}
            yield chunk(tool_calls=[{"index": number, "id": call["id"], "type": "function", "function": function}])
            yield chunk(tool_calls=[{"index": number, "function": {"arguments": base.arguments_text(call)}}])
        yield chunk(_finish_reason(answer.turn))
        if wants_usage:
            yield base.event(head | {"choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"


def _usage(answer: Answer) -> dict[str, int]:
    given, sampled = answer.num_input, answer.num_output
    return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}


def _canonical(message: Message) -> Message:
    role = {"developer": "system"}.get(message["role"], message["role"])
    content = base.joined(message.get("content"), text_types=("text", "refusal"))
    if role == "tool":
        return {"role": role, "tool_call_id": message["tool_call_id"], "content": content}
    canonical = {"role": role, "content": content}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        canonical["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        canonical["tool_calls"] = [
            base.tool_call(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls
        ]
    return canonical


def _message(message: Message) -> Message:
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": base.arguments_text(call)},
        }
        for call in message.get("tool_calls") or []
    ]
    written = {"role": "assistant", "content": message["content"] or (None if calls else ""), "refusal": None}
    if reasoning := message.get("reasoning_content"):
        written["reasoning_content"] = reasoning
    return written | ({"tool_calls": calls} if calls else {})


def _finish_reason(turn: Turn) -> str:
    if turn.response.stop_reason == "length":
        return "length"
    return "tool_calls" if turn.message.get("tool_calls") else "stop"


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.call.model}
