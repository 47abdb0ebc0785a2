"""A tiny model that has learned to paint rooms by a tool, in any of four colours, and to say so."""

import random
from pathlib import Path
from typing import Any

import torch
from testing_proxy import END
from testing_quickstart import make_tiny_model
from transformers import AutoModelForCausalLM

from arealite.utils.hf import load_hf_tokenizer

COLOURS = ("red", "green", "blue", "grey")
TOOL = "paint"
STEPS, BATCH, LR = 160, 24, 3e-3
# Of tools it writes the names only, so that each package's way to describe them makes the same prompt.
TEMPLATE = """{% if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def task(room: int) -> str:
    return f"Paint room {room}."


def painted(colour: str) -> str:
    """What the tool returns."""
    return f"It is {colour}."


def summary(colour: str) -> str:
    """What a harness asks when it has thrown the conversation away."""
    return f"So far: {painted(colour)} Go on."


NAME_ONE = "Name a colour."


def demonstrations(rng: random.Random) -> list[tuple[list[dict[str, Any]], bool]]:
    """Return one conversation of each kind, and whether it has the tool."""
    colour, room = rng.choice(COLOURS), rng.randrange(100)
    call = {"id": "c", "type": "function", "function": {"name": TOOL, "arguments": {"colour": colour}}}
    done = {"role": "assistant", "content": f"Done in {colour}."}
    whole = [
        {"role": "user", "content": task(room)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": painted(colour)},
        done,
    ]
    shortened = [{"role": "user", "content": task(room)}, {"role": "user", "content": summary(colour)}, done]
    named = [{"role": "user", "content": NAME_ONE}, {"role": "assistant", "content": colour}]
    return [(whole, True), (whole, True), (named, False), (shortened, True)]


def write_painter(folder: Path) -> str:
    """Train the model for some seconds, write it and its tokenizer, and return the folder."""
    texts = [
        f'{task(7)} {painted(c)} Done in {c}. {{"name": "{TOOL}", "arguments": {{"colour": "{c}"}}}}' for c in COLOURS
    ]
    make_tiny_model(folder, [*texts, NAME_ONE, summary("red"), "<tool_call>\n</tool_call>"] * 3, layers=2)
    tokenizer = load_hf_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": ["<|im_start|>"]})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    rng, tools = random.Random(1), [{"type": "function", "function": {"name": TOOL}}]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, 2 * (1 - step / STEPS))
        shown = [one for _ in range(BATCH // 4) for one in demonstrations(rng)]
        rendered = [
            tokenizer.apply_chat_template(messages, tools=tools if has_tool else None, tokenize=False)
            for messages, has_tool in shown
        ]
        batch = tokenizer(rendered, add_special_tokens=False, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
