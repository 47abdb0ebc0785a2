"""Conversations with a model that says what a test tells it to, in tokens of its own choice."""

import re
from typing import Any

from arealite.agent.bridge import Bridge, NextPrompt
from arealite.agent.turns import Run, Turn
from arealite.api.io_struct import ModelResponse

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "What to look up."},
                "pages": {"type": "integer", "description": "How many pages."},
            },
            "required": ["word"],
        },
    },
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def result(content: str, message: dict[str, Any], number: int = 0) -> dict[str, Any]:
    call = message["tool_calls"][number]
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": content}


def drifted(tokenizer: Any, text: str) -> list[int]:
    """Encode each character on its own, as a model may sample it and no encoding of the whole text is."""
    special = [str(one) for one in tokenizer.added_tokens_decoder.values()]
    pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
    units = [unit for piece in pieces for unit in ([piece] if piece in special else piece)]
    return [token for unit in units for token in tokenizer.encode(unit, add_special_tokens=False)]


class Talk:
    """One run of an agent: asks, samples what the test says, and remembers the prompts."""

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        self.tokenizer, self.bridge, self.run = tokenizer, Bridge(tokenizer, **options), Run()
        self.prompts: list[NextPrompt] = []

    def ask(
        self, messages: list[dict[str, Any]], says: str, *, tools: Any = None, end: str | None = "", **more: Any
    ) -> Turn:
        """Add a turn that says a text; `end` is the token after it (None: it is cut off, "": the tokenizer's eos)."""
        parent = more.pop("parent", None)
        prompt = self.bridge.prompt(self.run, messages, tools, parent=parent)
        self.prompts.append(prompt)
        ids = drifted(self.tokenizer, says) + ([] if end is None else [self.id_of(end or self.tokenizer.eos_token)])
        version, number = len(self.run.turns), len(ids)
        logprobs = [-0.25 - index / 64 for index in range(number)]
        reason = "length" if end is None else "stop"
        response = ModelResponse(prompt.ids, ids, logprobs, [version] * number, more.pop("reason", reason), "here:1")
        response.matched_stop = more.pop("matched_stop", None)
        raw_text, message = self.bridge.read(response, prompt.text, tools, self.run.counts)
        texts = (prompt.text, raw_text, messages, message)
        turn = Turn(f"turn-{version}", prompt.parent, response, *texts, tools=tools, branch=prompt.branch, **more)
        self.run.add(turn)
        return turn

    def id_of(self, token: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(token))
