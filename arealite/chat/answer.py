"""Parses sampled text to a message (thoughts, calls of tools, text) with transformers' response parser.

The format of a model's calls is the first of `_CALLS` that parses a call as the chat template writes it, unless the
tokenizer has a `response_template`. Mistakes that the parser would accept in silence (calls without a name, text that
belongs to no argument, truncated calls) are errors here.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from transformers.utils.chat_parsing.response_parser import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from arealite.chat.template import ChatText, Message

_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_TEXT = {"content": "text", "repeats": True, "join": "\n"}  # the parser would keep only the last piece of several
_JSON = {"content": "json", "repeats": True, "transform": _FUNCTION}
_XML = {"content": "xml-inline", "repeats": True, "transform": _FUNCTION}
_THOUGHTS = (  # how models frame what they think, if their chat template says so too
    {"open": "<think>", "close": "</think>"},
    {"open": "<|channel|>analysis<|message|>", "close_pattern": r"<\|end\|>|$"},
    {"open": "[THINK]", "close": "[/THINK]"},
)
_CALLS: tuple[dict[str, Any], ...] = (
    {  # <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
        **_JSON,
        "open_pattern": r"\s*<tool_call>",
        "close": "</tool_call>",
        "transform": {"type": "function", "function": "{content}"},
    },
    {  # <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
        **_XML,
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
    },
    {  # <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
        **_XML,
        "open_pattern": r"\s*<tool_call>(?P<name>[^<\s{]+)",
        "close": "</tool_call>",
        "content_args": {"tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"},
    },
    {  # to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>, the channel before or after the recipient
        **_JSON,
        "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)? ?to=functions\.(?P<name>[^\s<]+)"
        r"(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>",
        "close_pattern": r"<\|call\|>|$",
    },
    {  # [TOOL_CALLS]f[ARGS]{"a": 1}
        **_JSON,
        "open_pattern": r"\[TOOL_CALLS\] ?(?P<name>[^\[{\s]+)(?:\[CALL_ID\][^\[{]*)?\[ARGS\]",
        "close_pattern": r"(?=\[TOOL_CALLS\])|$",
    },
    {  # [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]
        "open": "[TOOL_CALLS]",
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        "transform_each": True,
    },
    {  # <｜tool▁call▁begin｜>function<｜tool▁sep｜>f ```json {"a": 1} ```<｜tool▁call▁end｜>
        **_JSON,
        "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        r"(?P<name>\S+)\s*```json",
        "close_pattern": r"```\s*<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
    },
    {  # <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>
        **_JSON,
        "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?P<name>\S+?)<｜tool▁sep｜>",
        "close_pattern": r"<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?",
    },
    {  # <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
        **_JSON,
        "open_pattern": r"\s*(?:<\|tool_calls_section_begin\|>)?\s*<\|tool_call_begin\|>\s*"
        r"(?P<id>(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
        "close_pattern": r"<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
        "transform": {**_FUNCTION, "id": "{id}"},
    },
    {  # <|tool_call>call:f{a:<|"|>text<|"|>}<tool_call|>
        **_JSON,
        "open_pattern": r"\s*<\|tool_call>call:(?P<name>[^\s{]+)",
        "close": "<tool_call|>",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    },
    {  # <|tool_call_start|>[f(a=1)]<|tool_call_end|>, one call
        **_XML,
        "open_pattern": r"\s*<\|tool_call_start\|>\[(?P<name>\w+)\(",
        "close_pattern": r"\)\]<\|tool_call_end\|>",
        "content_args": {
            "tag_pattern": r"(?P<key>\w+)=(?P<value>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\[[^\[\]]*\]|\{[^{}]*\}"
            r"|[^,'\"\[\]{}()]+)(?:,\s*|$)",
            "value_parser": {"name": "json", "args": {"string_delims": [["'", "'"]], "allow_non_json": True}},
        },
    },
    {  # {"name": "f", "parameters": {"a": 1}}, and nothing else
        **_JSON,
        "open_pattern": r'(?:<\|python_tag\|>)?(?=\{\s*"name"\s*:\s*"[^"]+"\s*,\s*"parameters"\s*:)',
        "repeats": False,
        "transform": [
            {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.parameters}"}}
        ],
    },
)
_SPOKEN: dict[str, dict[str, Any]] = {  # what is neither thought nor call; a format may frame it
    "to=functions": {
        "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>",
        "close_pattern": r"<\|(?:return|end)\|>|$",
        **_TEXT,
    },
}
_PROBE_ARGUMENTS = {"city": "Old Town", "days": 3, "near": ["a", "b"], "is_open": True}
_PROBE_IDS = ("call00000", "functions.look_up:0")  # some templates demand nine letters, others write the name like this
_TYPES = {"city": "string", "days": "integer", "near": "array", "is_open": "boolean"}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": kind, "description": name} for name, kind in _TYPES.items()},
            "required": list(_TYPES),
        },
    },
}


MalformedKind = Literal["cut_off", "json", "arguments", "text"]
"""What is wrong with a call: no end, no JSON, no name or arguments, or text that belongs to neither."""


class MalformedCall(ValueError):
    """A call of a tool that can't be read; it stays text."""

    def __init__(self, kind: MalformedKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class AnswerParser:
    """Reads the answers of one model.

    `thoughts` is how the model frames them, `call_format` how it calls tools; None if that is unknown.
    """

    def __init__(self, chat: ChatText) -> None:
        self._own = getattr(chat.tokenizer, "response_template", None)
        self.thoughts = next((frame for frame in _THOUGHTS if frame["open"] in chat.tokenizer.chat_template), None)
        formats = [] if self._own else _CALLS
        readable = ((calls, id) for calls in formats for id in _PROBE_IDS if self._reads_back(chat, calls, id))
        self.call_format: dict[str, Any] | None
        self.call_format, self.probe_id = next(readable, (None, _PROBE_IDS[0]))

    @property
    def reads_calls(self) -> bool:
        return self.call_format is not None or "tool_calls" in (self._own or {}).get("fields", {})

    def parse(self, raw_text: str, *, prompt_text: str, tools: list[Any] | None) -> Message:
        """Return the message of an answer: content, and reasoning_content and tool_calls if it has any.

        Calls are read if there are tools. Raises MalformedCall.
        """
        template = self._template(has_tools=bool(tools))
        if template is None:
            return {"role": "assistant", "content": raw_text}
        parsed = _parsed(template, raw_text, prompt_text if self._own else self.begun(prompt_text), tools)
        thoughts, calls = parsed.get("reasoning_content") or parsed.get("thinking"), parsed.get("tool_calls") or []
        content = (parsed.get("content") or "").strip()
        if content == raw_text.strip() or not (content or thoughts or calls):
            content = raw_text  # the parser strips, and drops what no format frames
        message: Message = {"role": "assistant", "content": content}
        message |= {"reasoning_content": thoughts} if thoughts else {}
        return message | ({"tool_calls": _checked(calls)} if calls else {})

    def begun(self, prompt_text: str) -> str:
        """Return the thoughts that a prompt ends with, such as `<think>` or empty ones."""
        if self.thoughts is None:
            return ""
        _, opened, rest = prompt_text.rpartition(self.thoughts["open"])
        is_end = not rest.replace(self.thoughts.get("close", ""), "").strip()
        return opened + rest if is_end else ""

    def _template(self, *, has_tools: bool, calls: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the response template of transformers, without calls if there are no tools."""
        if self._own is not None:
            fields = {name: field for name, field in self._own["fields"].items() if has_tools or name != "tool_calls"}
            return {**self._own, "fields": fields}
        calls = calls or self.call_format
        framed = next((frame for mark, frame in _SPOKEN.items() if mark in (calls or {}).get("open_pattern", "")), None)
        if self.thoughts is None and not (has_tools and calls) and framed is None:
            return None
        fields = {"content": framed or {**_TEXT, "join": "", "content_args": {"strip": False}}}
        fields |= {"reasoning_content": {**_TEXT, **self.thoughts}} if self.thoughts else {}
        fields |= {"tool_calls": calls} if calls and has_tools else {}
        return {"start_anchor_pattern": "^", "fields": fields}

    def _reads_back(self, chat: ChatText, calls: dict[str, Any], id: str) -> bool:
        """Return whether a format parses a call as the chat template writes it."""
        function = {"name": "look_up", "arguments": _PROBE_ARGUMENTS}
        call = {"id": id, "type": "function", "function": function}
        asked = {"role": "user", "content": "zqquestionqz"}
        template = self._template(has_tools=True, calls=calls)
        assert template is not None, "calls make a template"
        try:
            written = chat.render([asked, {"role": "assistant", "content": "", "tool_calls": [call]}], asks=False)
            answer = written.rpartition("zqquestionqz")[2]
            if chat.closing is not None:
                answer = answer.rstrip().removesuffix(chat.special[chat.closing])
            parsed = _checked(_parsed(template, answer, "", [_PROBE_TOOL]).get("tool_calls") or [])
        except (ValueError, KeyError):
            return False
        return [parsed_call["function"] for parsed_call in parsed] == [function]


def call_ids(ids: Sequence[int], num_calls: int) -> list[str]:
    """Return ids for the calls of one answer, of nine letters and digits, as some templates demand.

    They follow from the answer's token ids, since templates may write them into the next prompt.
    """
    digest = hashlib.blake2b(",".join(map(str, ids)).encode()).hexdigest()
    return [hashlib.blake2b(f"{digest}/{number}".encode()).hexdigest()[:9] for number in range(num_calls)]


def _parsed(template: dict[str, Any], text: str, prefix: str, tools: list[Any] | None) -> dict[str, Any]:
    """Parse, and verify that everything between the ends of a call was understood."""
    parser = ResponseParser(template, prefix=prefix, tools=tools)
    calls = load_response_template(template).fields.get("tool_calls")
    try:
        events = [*parser.initial_events, *parser.feed(text)]
        parsed, last = parser.finalize()
    except (ValueError, KeyError, RecursionError) as error:
        is_whole = calls is None or calls.close_re is None or calls.close_re.search(text)
        kind: MalformedKind = "json" if is_whole else "cut_off"
        raise MalformedCall(kind, f"calls of tools must be such as the chat template shows: got {error}") from error
    if calls is not None:
        bodies: list[str] = []
        for event in (event for event in (*events, *last) if event["field"] == "tool_calls"):
            bodies += [""] if event["type"] == "region_open" else []
            bodies[-1] += event["text"] if event["type"] == "region_chunk" else ""
        if calls.content == "xml-inline":
            rests = [re.sub(calls.content_args["tag_pattern"], "", body, flags=re.DOTALL) for body in bodies]
            if rest := "".join(rests).strip():
                raise MalformedCall("text", f"calls of tools must consist of their arguments: got also {rest!r}")
        is_open = bool(last) and last[-1]["field"] == "tool_calls" and calls.close_re is not None
        if is_open and not any(match.end() == len(text) for match in calls.close_re.finditer(text)):
            raise MalformedCall("cut_off", f"calls of tools must be complete: got {bodies[-1]!r}")
    return dict(parsed)


def _checked(calls: list[Any]) -> list[Message]:
    """Return calls that each have a name and arguments."""
    checked: list[Message] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else ("", "")
        if not (isinstance(name, str) and name.strip() and isinstance(arguments, dict)):
            message = f"calls of tools must have a name and an object of arguments: got {function!r}"
            raise MalformedCall("arguments", message)
        try:  # Python reads more than clients do
            json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            raise MalformedCall("json", f"calls of tools must be JSON: got {error}") from error
        own_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        checked.append({**own_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return checked
