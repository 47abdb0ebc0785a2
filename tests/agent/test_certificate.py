"""The published table of chat templates is what the certificate says of them. Run as a program, this prints it."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from testing_certificate import AS_READ, COLUMNS, by_mode, certify_turns, says
from testing_chat_templates import BEHAVIOURS, FAMILIES, real_tokenizer

from arealite.agent.bridge import Bridge

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def table(families: Iterable[str] = FAMILIES) -> str:
    """Markdown: one line for each family and thinking mode."""
    lines = [f"| template | {' | '.join(COLUMNS)} | {AS_READ} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for family in families:
        for mode, cells in by_mode(real_tokenizer(family)):
            name = f"{family}{'*' if family in BEHAVIOURS else ''}{f', {mode}' if mode else ''}"
            lines.append(f"| {name} | {' | '.join(cells.values())} |")
    return "\n".join(lines)


def test_lines_of_the_published_table_are_what_the_certificate_says() -> None:
    assert set(table(["Qwen2.5", "Qwen3", "gpt-oss"]).splitlines()) <= set(PAGE.read_text().splitlines())


@pytest.mark.slow
def test_the_published_table_is_what_the_certificate_says() -> None:
    assert len(FAMILIES) - len(BEHAVIOURS) >= 12
    assert table() in PAGE.read_text(), f"print it with python {Path(__file__).name}"


def test_a_list_of_tools_that_moves_to_the_last_question_is_seen() -> None:
    """So are results that nobody reads, and a parent's tokens that only sticking to them keeps."""
    mistral = certify_turns(real_tokenizer("Mistral Nemo"), enable_thinking=False)
    assert mistral == {"answer, user": "ok", "tool cycle": "ok", "tools, 2nd user": "rewrites", AS_READ: "rewrites"}
    assert certify_turns(real_tokenizer("Phi-3.5"), enable_thinking=False)["tool cycle"] == "drops"
    assert certify_turns(real_tokenizer("Gemma 3"), enable_thinking=False)["tool cycle"] == "refuses"


@pytest.mark.parametrize(
    ("family", "does", "text", "end"),
    [
        ("Qwen3", "answer", "<think>\nLet me think of cats.\n</think>\n\nIt is there.", "<|im_end|>"),
        (
            "Qwen2.5",
            "call",
            '<tool_call>\n{"name":"look_up","arguments":{"word":"cat","is_exact":false,"pages":4}}\n</tool_call>',
            "<|im_end|>",
        ),
        ("DeepSeek-R1 distillates", "answer", "Let me think of cats.</think>\n\nIt is there.", "<｜end▁of▁sentence｜>"),
        ("GLM-4.5", "answer", "\n<think>Let me think of cats.</think>\nIt is there.", None),
    ],
)
def test_what_the_model_says_is_what_the_template_would_write(family, does, text, end) -> None:
    bridge = Bridge(real_tokenizer(family), enable_thinking=True)
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
    prompt = bridge.chat.render([{"role": "user", "content": "Is the cat in the word list?"}], tools)
    said, token = says(bridge, prompt, does, tools)
    assert (said, bridge.chat.special.get(token)) == (text, end)


if __name__ == "__main__":
    print(table())
