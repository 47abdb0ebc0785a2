"""The chat-template certificate of agents: how the bridge treats the tokens of short conversations.

A column is a kind of conversation. The model's answers in it are what the template would write, with JSON in another
style.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from transformers.utils import get_json_schema

from arealite.agent.bridge import Bridge
from arealite.agent.turns import Run, Turn
from arealite.api.io_struct import ModelResponse
from arealite.chat.template import Message

Outcome = Literal["ok", "rewrites", "drops", "refuses", "-"]
OUTCOMES: dict[Outcome, str] = {
    "ok": "each prompt begins with the tokens before it, as the template writes it",
    "rewrites": "the template rewrites earlier turns: agent.history=keep continues them as sampled, template branches",
    "drops": "the model would not see the result of a tool: refused",
    "refuses": "the template refuses such messages",
    "-": "calls of tools can't be read",
}
COLUMNS: dict[str, tuple[str, ...]] = {  # actions of the model, each followed by the role that answers
    "answer, user": ("answer", "user", "answer", "user"),
    "tool cycle": ("call", "tool", "call", "tool", "answer"),
    "tools, 2nd user": ("call", "tool", "answer", "user", "answer", "user"),
}
AS_READ = "calls as read"
_ASKED = {"role": "user", "content": "Is the cat in the word list?"}
_ARGUMENTS = {"word": "cat", "is_exact": False, "pages": 4}
_THOUGHT = "Let me think of cats."


def look_up(word: str, is_exact: bool = False, pages: int = 1):  # type: ignore[no-untyped-def]  # models would see it
    """Look a word up.

    Args:
        word: The word.
        is_exact: Whether case counts.
        pages: How many pages.
    """


_TOOL = get_json_schema(look_up)


def certify_turns(tokenizer: Any, *, enable_thinking: bool) -> dict[str, Outcome]:
    """Return the outcome of each kind of conversation.

    Raises ValueError if the template can't write plain questions and answers.
    """
    template = Bridge(tokenizer, history="template", enable_thinking=enable_thinking)
    keep = Bridge(tokenizer, history="keep", enable_thinking=enable_thinking)
    cells: dict[str, Outcome] = {}
    for column, steps in COLUMNS.items():
        cells[column] = _outcome(template, steps)
        if cells[column] == "rewrites" and (kept := _outcome(keep, steps)) != "ok":
            cells[column] = kept
    if template.parser.reads_calls:
        return {**cells, AS_READ: _as_read(template)}
    for column in (column for column, steps in COLUMNS.items() if "call" in steps):
        cells[column] = cells[column] if cells[column] in ("drops", "refuses") else "-"
    return {**cells, AS_READ: "-"}


def by_mode(tokenizer: Any) -> Iterator[tuple[str, dict[str, Outcome]]]:
    """Yield the certificate by thinking mode; one row without a name if both modes are equal."""
    off, on = (certify_turns(tokenizer, enable_thinking=thinks) for thinks in (False, True))
    yield from [("", off)] if off == on else [("without thinking", off), ("thinking", on)]


def _outcome(bridge: Bridge, steps: Sequence[str]) -> Outcome:
    run, messages = Run(), [_ASKED]
    tools = [_TOOL] if "call" in steps else None
    for number, (does, follows) in enumerate(zip(steps[::2], [*steps[1::2], ""])):
        try:
            turn = _turn(bridge, run, messages, tools, does)
        except ValueError as error:
            return "drops" if "must see every message" in str(error) else "refuses"
        calls = turn.message.get("tool_calls", [])
        name = {"tool_call_id": calls[0]["id"], "name": "look_up"} if calls else {}
        messages = [*turn.conversation, {"role": follows, "content": f"Page {number} follows.", **name}]
    return "rewrites" if run.branches["template"] else "ok"


def _as_read(bridge: Bridge) -> Outcome:
    """Return whether the template writes a parsed call as it was sampled."""
    turn = _turn(bridge, Run(), [_ASKED], [_TOOL], "call")
    result = {"role": "tool", "content": "Page 1.", "tool_call_id": "call00000", "name": "look_up"}
    try:
        text = bridge.chat.render([*turn.conversation, result], [_TOOL])
    except ValueError:
        return "refuses"
    return "ok" if text.startswith(turn.text) else "rewrites"


def _turn(bridge: Bridge, run: Run, messages: list[Message], tools: list[Any] | None, does: str) -> Turn:
    prompt = bridge.prompt(run, messages, tools)
    text, end = says(bridge, prompt.text, does, tools)
    ids = bridge.chat.encode(text) + ([] if end is None else [end])
    count = len(ids)
    response = ModelResponse(prompt.ids, ids, [0.0] * count, [0] * count, "length" if end is None else "stop", "")
    raw_text, message = bridge.read(response, prompt.text, tools, run.counts)
    texts = (prompt.text, raw_text, messages, message)
    turn = Turn(str(count), prompt.parent, response, *texts, tools=tools, branch=prompt.branch)
    run.add(turn)
    return turn


def says(bridge: Bridge, prompt_text: str, does: str, tools: list[Any] | None) -> tuple[str, int | None]:
    """Return the text of an answer or a call as a model would sample it, and its special end token, if any."""
    chat, parser = bridge.chat, bridge.parser
    message: Message = {"role": "assistant", "content": "It is there."}
    if does == "call" and parser.reads_calls:
        function = {"name": "look_up", "arguments": _ARGUMENTS}
        message = {"role": "assistant", "content": ""}
        message["tool_calls"] = [{"id": parser.probe_id, "type": "function", "function": function}]
    begun = parser.begun(prompt_text)
    frame = parser.thoughts or {}
    close = frame.get("close", "")
    thinks = parser.thoughts is not None and (close not in begun if begun else chat.enable_thinking)
    if thinks:
        message |= {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    asked, written = chat.render([_ASKED], tools), chat.render([_ASKED, message], tools, asks=False)
    own = written[len(asked) - (0 if written.startswith(asked) else len(chat.opening)) :]
    if thinks and _THOUGHT not in own:
        own = f"{'' if begun else frame['open']}{_THOUGHT}{close}\n\n{own}"
    end = chat.last_special(own) if chat.closing is not None else None
    own = own[: own.rfind(chat.special[end])] if end is not None else own.rstrip()
    if does == "call":
        own = own.replace('": ', '":').replace(', "', ',"').replace("False", "false")
    return own, end
