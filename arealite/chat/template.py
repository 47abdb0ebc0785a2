"""Conversations as tokens: the prompts that a model completes, and the demonstrations that it is fine-tuned on."""

import re
from collections.abc import Sequence
from typing import Any

from arealite.chat.text import REFUSALS

_QUESTION, _ANSWER = "How much is 2 + 2?", "The answer is 4."  # a turn to render in front of the new messages
_MARKS_TURNS = re.compile(r"\{%-?\s*generation\b")  # with which a template says what the model writes
_NO_TEMPLATE = (
    "conversations with an assistant's turns or images must have a chat template: got a tokenizer without one. "
    "Add chat_template.jinja to tokenizer_path."
)


def prompt_tokens(
    tokenizer: Any, conversations: Sequence[list[dict[str, Any]]], *, enable_thinking: bool = False
) -> list[list[int]]:
    """Return what a model is asked for each conversation; without a chat template, its texts."""
    if tokenizer.chat_template is not None:
        rendered = [_render(tokenizer, one, asks=True, enable_thinking=enable_thinking) for one in conversations]
        return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    messages = [message for one in conversations for message in one]
    if any(one["role"] == "assistant" or not isinstance(one["content"], str) for one in messages):
        raise ValueError(_NO_TEMPLATE)
    return list(tokenizer(["\n\n".join(message["content"] for message in one) for one in conversations])["input_ids"])


def next_prompt(
    tokenizer: Any, tokens: list[int], messages: list[dict[str, Any]], *, enable_thinking: bool = False
) -> list[int]:
    """Return what a model is asked after `tokens`, a prompt and the answer that it sampled, and further `messages`.

    The tokens stay as they are; what follows them is what the template writes after an answer.
    """
    if tokenizer.chat_template is None:
        raise ValueError(_NO_TEMPLATE)
    dummy = [_message("user", _QUESTION), _message("assistant", _ANSWER)]
    text = _render(tokenizer, [*dummy, *messages], asks=True, enable_thinking=enable_thinking)
    ids = _encode(tokenizer, text.partition(_ANSWER)[2])
    return [*tokens, *(ids[1:] if tokens[-1:] == ids[:1] else ids)]  # an answer that was cut off has no end token


def demonstration(tokenizer: Any, messages: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Return `input_ids` and `loss_mask` of a conversation: 1 on each turn of the assistant and the token that ends it.

    Turns are those that the template marks (`{% generation %}`), else what it adds to the conversation before them.
    """
    if tokenizer.chat_template is None:
        raise ValueError(_NO_TEMPLATE)
    if _MARKS_TURNS.search(tokenizer.chat_template):
        marked = _applied(tokenizer, messages, return_dict=True, return_assistant_tokens_mask=True)
        return {"input_ids": list(marked["input_ids"]), "loss_mask": list(marked["assistant_masks"])}
    text = _render(tokenizer, messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, starts = list(encoded["input_ids"]), [start for start, _ in encoded["offset_mapping"]]
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    loss_mask = [0] * len(ids)
    for turn in (index for index, message in enumerate(messages) if message["role"] == "assistant"):
        before, after = _render(tokenizer, messages[:turn], asks=True), _render(tokenizer, messages[: turn + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} must keep earlier turns as they are: got one that "
                f"rewrites message {turn + 1} of {len(messages)}. Mark the assistant's turns in it with "
                "{% generation %}, or use another chat_template.jinja."
            )
        tokens = [index for index, start in enumerate(starts) if len(before) <= start < len(after)]
        last = max((index for index in tokens if ids[index] in special), default=len(ids))  # line breaks may follow
        for index in tokens:
            loss_mask[index] = int(index <= last)
    return {"input_ids": ids, "loss_mask": loss_mask}


def _render(
    tokenizer: Any, messages: list[dict[str, Any]], *, asks: bool = False, enable_thinking: bool = False
) -> str:
    return str(_applied(tokenizer, messages, enable_thinking, tokenize=False, add_generation_prompt=asks))


def _applied(tokenizer: Any, messages: list[dict[str, Any]], enable_thinking: bool = False, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, enable_thinking=enable_thinking, **options)
    except REFUSALS as error:
        raise ValueError(
            f"the chat template must take the conversations of the data: got {error}. Change their roles, or "
            "train_dataset.system_prompt."
        ) from error


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
