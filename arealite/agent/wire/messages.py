"""Anthropic's messages: `POST /v1/messages`, with threads."""

import json
from collections.abc import Iterator
from typing import Any

from arealite.agent.wire import base
from arealite.agent.wire.base import Answer, Call, Find, Message, RefusedError, Wire


class Messages(Wire):
    prefix = "msg_"
    heartbeat = base.event({"type": "ping"}, "ping")

    def parse(self, body: dict[str, Any], find: Find) -> Call:
        messages: list[Message] = []
        if system := base.joined(body.get("system")):
            messages.append({"role": "system", "content": system})
        tools = [_tool(tool) for tool in body.get("tools") or []] or None
        previous = (body.get("thread") or {}).get("previous_message_id")
        if previous is not None:
            before = find(previous)
            messages = [*before.call.messages, before.turn.message]
            tools = tools or before.call.tools
        for message in body["messages"]:
            messages += _canonical(message)
        if not messages:
            raise RefusedError("messages must have at least one message: got none. Send a user message.")
        return Call(
            body,
            messages,
            tools,
            max_tokens=base.read_limit(body, "max_tokens"),
            stop=base.read_stop(body, "stop_sequences"),
            parent=previous,
        )

    def body(self, answer: Answer) -> dict[str, Any]:
        reason, matched = _stop(answer)
        more = {"stop_reason": reason, "stop_sequence": matched, "content": _blocks(answer)}
        return _head(answer) | more | {"usage": _usage(answer, answer.num_output)}

    def events(self, answer: Answer) -> Iterator[bytes]:
        def write(kind: str, **fields: Any) -> bytes:
            return base.event({"type": kind} | fields, kind)

        begun = _head(answer) | {"content": [], "usage": _usage(answer, 0)}
        yield write("message_start", message=begun)
        for index, block in enumerate(_blocks(answer)):
            empty, deltas = _pieces(block)
            yield write("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield write("content_block_delta", index=index, delta=delta)
            yield write("content_block_stop", index=index)
        reason, matched = _stop(answer)
        delta = {"stop_reason": reason, "stop_sequence": matched}
        yield write("message_delta", delta=delta, usage={"output_tokens": answer.num_output})
        yield write("message_stop")

    def error(self, error: RefusedError) -> dict[str, Any]:
        kind = "invalid_request_error" if error.status == 400 else "conflict_error"
        return {"type": "error", "error": {"type": kind, "message": str(error), "code": error.code}}

    def error_event(self, error: RefusedError) -> bytes:
        return base.event(self.error(error), "error")


def _canonical(message: Message) -> list[Message]:
    """Return a message as one message, or as tool results followed by the user's text."""
    role, content = message["role"], message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if role == "assistant":
        return [_assistant(blocks)]
    results = [
        {"role": "tool", "tool_call_id": block["tool_use_id"], "content": base.joined(block.get("content"))}
        for block in blocks
        if block["type"] == "tool_result"
    ]
    others = [block for block in blocks if block["type"] != "tool_result"]
    said = [{"role": role, "content": base.joined(others)}] if others or not results else []
    return [*results, *said]


def _assistant(blocks: list[dict[str, Any]]) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    for block in blocks:
        kind = block["type"]
        if kind == "text":
            message["content"] += block["text"]
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + block["thinking"]
        elif kind == "tool_use":
            message.setdefault("tool_calls", []).append(base.tool_call(block["id"], block["name"], block["input"]))
        else:
            raise RefusedError(f"an assistant's blocks must be text, thinking or tool_use: got {kind!r}.")
    return message


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise RefusedError(f"tools must be your own: got {tool['type']!r}. Leave out what the server would run.")
    return base.function_tool(tool["name"], tool.get("description"), tool["input_schema"])


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    message = answer.turn.message
    blocks: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": answer.id})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"], "citations": None})
    for call in message.get("tool_calls") or []:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    return blocks


def _pieces(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the start event of a block in a stream, and its deltas."""
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        deltas = [{"type": f"{kind}_delta", kind: block[kind]} for kind in ("thinking", "signature")]
        return block | {"thinking": "", "signature": ""}, deltas
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _stop(answer: Answer) -> tuple[str, str | None]:
    turn = answer.turn
    if turn.response.stop_reason == "length":
        return "max_tokens", None
    if turn.message.get("tool_calls"):
        return "tool_use", None
    matched = turn.response.matched_stop
    return ("end_turn", None) if matched is None else ("stop_sequence", matched)


def _usage(answer: Answer, num_output: int) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": answer.num_input, "output_tokens": num_output} | cached


def _head(answer: Answer) -> dict[str, Any]:
    head = {"id": answer.id, "type": "message", "role": "assistant", "model": answer.call.model}
    return head | {"stop_reason": None, "stop_sequence": None}
