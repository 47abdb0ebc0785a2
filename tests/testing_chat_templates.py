"""Chat templates in the style of well-known models, on a byte-level tokenizer with their special tokens."""

import importlib.util
import re
from pathlib import Path
from typing import Any

from testing_quickstart import make_tiny_model, train_tokenizer

from arealite.utils.hf import load_hf_tokenizer

QWEN2_5 = """{% if messages[0].role != 'system' %}<|im_start|>system
You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN3 = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think>

</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% if messages[0].role != 'system' %}<|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023<|eot_id|>{% endif %}{% for m in messages %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

GEMMA = """{{ '<bos>' }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

STYLES = {
    "qwen2.5": (QWEN2_5, ["<|im_end|>", "<|im_start|>"]),
    "qwen3": (QWEN3, ["<|im_end|>", "<|im_start|>"]),
    "llama": (LLAMA3, ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]),
    "gemma": (GEMMA, ["<end_of_turn>", "<bos>", "<start_of_turn>"]),
}
"""Template and special tokens, of which the first ends a turn."""


def tokenizer_of(style: str, folder: Any) -> Any:
    """Return a tokenizer whose end token is the one that ends a turn."""
    tokenizer = load_hf_tokenizer(make_tiny_model(folder, ["What is 1+1? #### 2"], layers=1))
    tokenizer.chat_template, special = STYLES[style]
    tokenizer.add_special_tokens({"eos_token": special[0], "additional_special_tokens": special[1:]})
    return tokenizer


MISTRAL_NEMO = """<s>{% set last = namespace(user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}
{%- if tools and loop.index0 == last.user %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{{ m.content }}[/INST]
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids of calls have 9 characters') }}{% endif -%}
[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{{ c.function | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"""

KIMI_K2 = """{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}<|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>{{ m.name or m.role -}}
<|im_middle|>{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}
{% endif %}{{ m.content or '' }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls -%}
<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

DEEPSEEK_V3_1 = """<s>{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- if tools %}## Tools
{{ tools | tojson }}
{% endif %}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}
{%- if not loop.last and messages[loop.index0 + 1].role == 'assistant' %}<｜Assistant｜></think>{% endif %}
{%- elif m.role == 'assistant' %}{{ (m.content or '').split('</think>')[-1] }}
{%- if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls -%}
<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ '' + c.function.arguments }}<｜tool▁call▁end｜>
{%- endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>
{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role == 'user' %}<｜Assistant｜>
{{- '<think>' if enable_thinking else '</think>' }}{% endif %}"""

BEHAVIOURS = {"Mistral Nemo": MISTRAL_NEMO, "Kimi-K2": KIMI_K2, "DeepSeek-V3.1": DEEPSEEK_V3_1}
"""Templates of our own that treat turns as those models' do."""

FAMILIES = {  # file in trl's folder of templates, as models ship them ("": ours), and the token that ends an answer
    "Qwen2.5": ("qwen2_5", "<|im_end|>"),
    "Qwen3": ("qwen3", "<|im_end|>"),
    "Qwen3-2507": ("qwen3_instruct_2507", "<|im_end|>"),
    "Qwen3.5": ("qwen3_5_think", "<|im_end|>"),
    "Qwen3.6": ("qwen3_6", "<|im_end|>"),
    "Llama 3": ("llama3", "<|eot_id|>"),
    "Llama 3.1": ("llama3_1", "<|eot_id|>"),
    "Llama 3.2": ("llama3_2", "<|eot_id|>"),
    "LFM2": ("lfm2_v2", "<|im_end|>"),
    "LFM2.5": ("lfm2_2_5", "<|im_end|>"),
    "Nemotron 3": ("nemotron_3_nano", "<|im_end|>"),
    "GLM-4.5": ("glm4moe", "<|user|>"),
    "DeepSeek-R1-0528": ("deepseekv3", "<｜end▁of▁sentence｜>"),
    "DeepSeek-R1 distillates": ("deepseek_r1_distill", "<｜end▁of▁sentence｜>"),
    "gpt-oss": ("gptoss", "<|return|>"),
    "Gemma 1, 2": ("gemma", "<end_of_turn>"),
    "Gemma 3": ("gemma3", "<end_of_turn>"),
    "Gemma 4": ("gemma4", "<turn|>"),
    "Phi-3": ("phi3", "<|end|>"),
    "Phi-3.5": ("phi3_5", "<|end|>"),
    "Command R": ("cohere", "<|END_OF_TURN_TOKEN|>"),
    "Command A": ("cohere2", "<|END_OF_TURN_TOKEN|>"),
    "SmolVLM": ("smolvlm", "<end_of_utterance>"),
    "Mistral Nemo": ("", "</s>"),
    "Kimi-K2": ("", "<|im_end|>"),
    "DeepSeek-V3.1": ("", "<｜end▁of▁sentence｜>"),
}
_SPECIAL = re.compile(
    r"<\|\w+\|>|<｜[^｜]+｜>|<(?:start|end)_of_\w+>|<sop>|\[gMASK\]|\[/?[A-Z]{4,}(?:_[A-Z]+)*\]|<\|\"\|>|<\|[a-z_]+>|<[a-z_]+\|>"
)
_EXTRA = {
    "Kimi-K2": ["<|im_user|>", "<|im_assistant|>"],
    "gpt-oss": ["<|constrain|>"],
    "Qwen3": ["<|endoftext|>"],
}  # tokens of the models that templates don't write


def real_tokenizer(family: str) -> Any:
    """Return a small byte-level tokenizer with a family's own template and special tokens."""
    name, end = FAMILIES[family]
    tokenizer = train_tokenizer(["How much is 2 + 2?\n\n\nThe answer is 4."] * 20, vocab_size=512, max_position=512)
    trl = importlib.util.find_spec("trl")
    assert trl is not None and trl.origin is not None
    file = Path(trl.origin).parent / "chat_templates" / f"{name}.jinja"
    tokenizer.chat_template = file.read_text() if name else BEHAVIOURS[family]
    special = {*_SPECIAL.findall(tokenizer.chat_template), *_EXTRA.get(family, [])} - {end}
    tokenizer.add_special_tokens({"eos_token": end, "bos_token": "<s>", "additional_special_tokens": sorted(special)})
    return tokenizer
