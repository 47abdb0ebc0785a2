"""OpenAI's completions of plain text or token ids, without a chat template: `POST /v1/completions`."""

from collections.abc import Iterator
from typing import Any

from arealite.agent.wire import base
from arealite.agent.wire.base import Answer, Call, Find, RefusedError, Wire
from arealite.agent.wire.chat import head, usage

_KIND = "text_completion"


class Completions(Wire):
    prefix = "cmpl-"

    def parse(self, body: dict[str, Any], find: Find) -> Call:
        base.refuse(body, "echo", "suffix", "best_of")
        prompt = body["prompt"]
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            (prompt,) = prompt
        is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids):
            raise RefusedError(f"prompt must be one text, or the ids of its tokens: got {prompt!r:.100}. Send one.")
        return Call(
            body,
            prompt=prompt,
            max_tokens=base.read_limit(body, "max_tokens"),
            stop=base.read_stop(body, "stop"),
            n=base.read_count(body),
        )

    def body(self, answer: Answer) -> dict[str, Any]:
        choices = [self._choice(answer, index) for index in range(len(answer.turns))]
        return head(answer, _KIND) | {"choices": choices, "usage": usage(answer)}

    def events(self, answer: Answer) -> Iterator[bytes]:
        for index in range(len(answer.turns)):
            yield base.event(head(answer, _KIND) | {"choices": [self._choice(answer, index)]})
        if answer.call.wants_usage:
            yield base.event(head(answer, _KIND) | {"choices": [], "usage": usage(answer)})
        yield b"data: [DONE]\n\n"

    def _choice(self, answer: Answer, index: int) -> dict[str, Any]:
        turn, logprobs = answer.turns[index], None
        if answer.call.wants_logprobs:
            tokens = answer.tokens[index]
            starts = [len("".join(tokens[:number])) for number in range(len(tokens))]
            logprobs = {
                "tokens": tokens,
                "token_logprobs": turn.response.output_logprobs,
                "top_logprobs": None,
                "text_offset": starts,
            }
        return {
            "index": index,
            "text": turn.raw_text.partition(matched)[0] if (matched := turn.response.matched_stop) else turn.raw_text,
            "finish_reason": turn.response.stop_reason,
            "logprobs": logprobs,
        }
