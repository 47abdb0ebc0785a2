"""OpenAI's responses: `POST /v1/responses`, with `previous_response_id`."""

from collections.abc import Iterator
from typing import Any

from arealite.agent.wire import base
from arealite.agent.wire.base import Answer, Call, Find, Message, RefusedError, Wire

_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


class Responses(Wire):
    prefix = "resp_"

    def parse(self, body: dict[str, Any], find: Find) -> Call:
        base.refuse(body, "background", "conversation", "prompt")
        given = body.get("input") or []
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        messages: list[Message] = []
        previous = base.read(body, "previous_response_id", str, "") or None
        if previous is not None:  # its instructions do not carry over
            before = find(previous)
            had_instructions = bool(before.call.body.get("instructions"))
            messages += [*before.call.messages[had_instructions:], before.turn.message]
        num_before = len(messages)
        for item in items:
            _add(messages, item, num_before, find)
        if instructions := base.read(body, "instructions", str, ""):
            messages.insert(0, {"role": "system", "content": instructions})
        if not messages:
            raise RefusedError("input must have at least one item: got none. Send a text or a message.")
        return Call(
            body,
            messages,
            [base.own_tool(tool, tool) for tool in body.get("tools") or []] or None,
            max_tokens=base.read_limit(body, "max_output_tokens"),
            parent=previous,
        )

    def body(self, answer: Answer) -> dict[str, Any]:
        return _head(answer) | _end(answer)

    def events(self, answer: Answer) -> Iterator[bytes]:
        number = -1

        def write(kind: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            name = f"response.{kind}"
            return base.event({"type": name, "sequence_number": number} | fields, name)

        begun = _head(answer) | {"status": "in_progress", "output": [], "usage": None}
        yield write("created", response=begun)
        yield write("in_progress", response=begun)
        for index, item in enumerate(_items(answer)):
            place = {"output_index": index, "item_id": item["id"]}
            empty: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
            yield write("output_item.added", output_index=index, item=item | empty | {"status": "in_progress"})
            if item["type"] == "function_call":
                arguments = item["arguments"]
                yield write("function_call_arguments.delta", **place, delta=arguments)
                yield write("function_call_arguments.done", **place, name=item["name"], arguments=arguments)
            else:
                (part,) = item["content"]
                more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
                yield write("content_part.added", **place, content_index=0, part=part | {"text": ""})
                yield write(f"{part['type']}.delta", **place, content_index=0, delta=part["text"], **more)
                yield write(f"{part['type']}.done", **place, content_index=0, text=part["text"], **more)
                yield write("content_part.done", **place, content_index=0, part=part)
            yield write("output_item.done", output_index=index, item=item)
        end = _head(answer) | _end(answer)
        yield write(end["status"], response=end)

    def error_event(self, error: RefusedError) -> bytes:
        fields = {"code": error.code, "message": str(error), "param": None, "sequence_number": 0}
        return base.event({"type": "error"} | fields, "error")


def _add(messages: list[Message], item: Message, num_before: int, find: Find) -> None:
    """Add an input item, merging the items of one answer into one message."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        content = base.joined(item["output"], text_types=_TEXTS)
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    elif kind == "message" and item["role"] != "assistant":
        role = {"developer": "system"}.get(item["role"], item["role"])
        messages.append({"role": role, "content": base.joined(item["content"], text_types=_TEXTS)})
    elif kind == "item_reference":
        referred = {output["id"]: output for output in _items(find(Responses.prefix + item["id"].split("_")[1]))}
        _add(messages, referred[item["id"]], num_before, find)
    elif kind in ("message", "function_call", "reasoning"):
        if len(messages) == num_before or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        answer = messages[-1]
        if kind == "message":
            answer["content"] += base.joined(item["content"], text_types=_TEXTS)
        elif kind == "reasoning":
            text = base.joined(item.get("content") or item.get("summary"), text_types=_TEXTS)
            if text:
                answer["reasoning_content"] = text
        else:
            call = base.tool_call(item["call_id"], item["name"], item["arguments"])
            answer.setdefault("tool_calls", []).append(call)
    else:
        raise RefusedError(f"items of input must be messages, function calls and their outputs: got {kind!r}.")


def _items(answer: Answer) -> list[dict[str, Any]]:
    message, name = answer.turn.message, answer.id.removeprefix(Responses.prefix)
    items: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": content})
    calls = message.get("tool_calls") or []
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        items.append({"id": f"msg_{name}", "type": "message", "role": "assistant", "content": [part]})
    for number, call in enumerate(calls):
        function = {"call_id": call["id"], "name": call["function"]["name"], "arguments": base.arguments_text(call)}
        items.append({"id": f"fc_{name}_{number}", "type": "function_call"} | function)
    return [item | {"status": "completed"} for item in items]


def _head(answer: Answer) -> dict[str, Any]:
    body = answer.call.body
    echoed = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "metadata", "user")
    return {
        "id": answer.id,
        "object": "response",
        "created_at": answer.created,
        "model": answer.call.model,
        "error": None,
        "incomplete_details": None,
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "text": body.get("text") or {"format": {"type": "text"}},
        "truncation": "disabled",
        **{name: body.get(name) for name in echoed},
    }


def _end(answer: Answer) -> dict[str, Any]:
    is_cut = answer.turn.response.stop_reason == "length"
    return {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(answer),
        "usage": {
            "input_tokens": answer.num_input,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_input + answer.num_output,
        },
    }
