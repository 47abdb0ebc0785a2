"""Chat templates in the style of well-known models, on a byte-level tokenizer with their special tokens."""

from typing import Any

from testing_quickstart import make_tiny_model

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
