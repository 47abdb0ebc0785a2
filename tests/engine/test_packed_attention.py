from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from arealite.api.errors import ConfigError
from arealite.engine import packed_attention
from arealite.engine.packed_attention import (
    PACKED_SDPA,
    PACKED_VARLEN,
    OnCPU,
    check_packable,
    packed_sdpa,
    pick_attention,
    sequence_bounds,
)

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LENGTHS = [7, 1, 12, 4, 12]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0] * 4,
    "original_max_position_embeddings": 8,
}


FULL = ["full_attention", "full_attention"]
OF_TOKENS, OF_ROWS = "must be full or sliding-window attention", "must not depend on the longest row: got rope_type {}"


def models() -> dict[str, tuple]:
    alternating = ["full_attention", "sliding_attention", "full_attention"]
    return {
        "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16)),
        "qwen2 sliding": (
            Qwen2ForCausalLM,
            Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=3, layer_types=alternating),
        ),
        "llama yarn": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=YARN)),
        "mistral sliding": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=5)),
    }


@pytest.mark.parametrize("name", list(models()))
def test_packed_logits_and_gradients_equal_padded_ones(name: str) -> None:
    torch.manual_seed(0)
    make, config = models()[name]
    model = make(config)
    attention_mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    input_ids = torch.randint(0, 40, attention_mask.shape)
    weights = torch.randn(sum(LENGTHS), 40)

    model.set_attn_implementation("eager")
    padded = model(input_ids=input_ids, attention_mask=attention_mask).logits[attention_mask]
    (padded * weights).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    model.set_attn_implementation(PACKED_SDPA)
    check_packable(model)
    packed = model(
        input_ids=input_ids[attention_mask][None],
        position_ids=(attention_mask.cumsum(1) - 1)[attention_mask][None],
        use_cache=False,
        **sequence_bounds(PACKED_SDPA, LENGTHS, torch.device("cpu")),
    ).logits[0]
    (packed * weights).sum().backward()
    torch.testing.assert_close(packed, padded, atol=2e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5 * max(scale, 1.0), rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "config", "told"),
    [
        (MambaForCausalLM, MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1), OF_TOKENS),
        (Qwen3NextForCausalLM, Qwen3NextConfig(**SIZES, layer_types=["linear_attention", *FULL]), OF_TOKENS),
        (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=DYNAMIC), OF_ROWS.format("dynamic")),
        (Phi3ForCausalLM, Phi3Config(**SIZES, pad_token_id=0, rope_parameters=LONGROPE), OF_ROWS.format("longrope")),
    ],
    ids=["mamba", "linear", "dynamic", "longrope"],
)
def test_models_that_mix_tokens_otherwise_or_change_with_the_longest_row_are_refused(
    make: type, config: object, told: str
) -> None:
    with torch.device("meta"):
        model = make(config)
    with pytest.raises(ValueError, match=told):
        check_packable(model)


def test_encoders_are_refused() -> None:
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    for is_decoder in (False, True):
        with torch.device("meta"):
            model = BertLMHeadModel(BertConfig(**sizes, intermediate_size=48, is_decoder=is_decoder))
        if is_decoder:
            check_packable(model)
        else:
            with pytest.raises(ValueError, match="BertLMHeadModel with attention to later tokens"):
                check_packable(model)


def test_soft_capped_scores_are_refused() -> None:
    query = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match="must not need softcap"):
        packed_sdpa(
            torch.nn.Identity(), query, query, query, None, cu_seqlens=OnCPU(torch.tensor([0, 5])), softcap=50.0
        )


# Choice


class Installed:
    """What a machine has, in the places where the choice looks."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch

    def __call__(self, *, flash_attn: bool, built_in: bool, capability: tuple[int, int]) -> None:
        self.patch.setattr(packed_attention, "is_flash_attn_2_available", lambda: flash_attn)
        self.patch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built_in)
        self.patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


H100 = {"flash_attn": True, "built_in": True, "capability": (9, 0)}
BARE = H100 | {"flash_attn": False}
V100 = BARE | {"capability": (7, 0)}


@pytest.mark.parametrize(
    ("machine", "device", "dtype", "given", "picked"),
    [
        (H100, "cuda", torch.bfloat16, None, "flash_attention_2"),
        (BARE, "cuda", torch.bfloat16, None, PACKED_VARLEN),
        (BARE, "cuda", torch.float16, None, PACKED_VARLEN),
        (BARE | {"built_in": False}, "cuda", torch.bfloat16, None, PACKED_SDPA),
        (V100, "cuda", torch.bfloat16, None, PACKED_SDPA),
        (H100, "cuda", torch.float32, None, PACKED_SDPA),
        (H100, "cpu", torch.bfloat16, None, PACKED_SDPA),
        (H100, "cuda", torch.bfloat16, PACKED_VARLEN, PACKED_VARLEN),
        (H100, "cuda", torch.bfloat16, "sdpa", "sdpa"),
        (H100, "cpu", torch.float32, "sdpa", "sdpa"),
    ],
)
def test_the_attention_that_is_picked(
    monkeypatch: pytest.MonkeyPatch,
    machine: dict[str, Any],
    device: str,
    dtype: torch.dtype,
    given: str | None,
    picked: str,
) -> None:
    Installed(monkeypatch)(**machine)
    assert pick_attention(given, torch.device(device), dtype)[0] == picked


@pytest.mark.parametrize(
    ("machine", "device", "dtype"),
    [(BARE, "cpu", torch.bfloat16), (BARE, "cuda", torch.float32), (V100, "cuda", torch.bfloat16)],
)
def test_varlen_attention_where_it_does_not_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], device: str, dtype: torch.dtype
) -> None:
    Installed(monkeypatch)(**machine)
    with pytest.raises(ConfigError, match=f"must have a GPU of compute capability 8.0 .*: got {device} and "):
        pick_attention(PACKED_VARLEN, torch.device(device), dtype)


def test_varlen_attention_gets_windows_and_bounds_as_its_kernel_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs on GPUs only; what it is given is told by the numbers that SDPA gets from it."""
    query, key, value = (torch.randn(1, heads, 9, 8) for heads in (4, 2, 2))
    for window in (None, 3):
        monkeypatch.setattr(packed_attention, "varlen_attn", slow_varlen)
        options = {"scaling": 0.3, "sliding_window": window}
        found, expected = (
            attend(torch.nn.Identity(), query, key, value, None, **bounds, **options)[0]
            for attend, bounds in (
                (packed_attention.packed_varlen, {"cu_seqlens": torch.tensor([0, 5, 9]), "max_length": 5}),
                (packed_attention.packed_sdpa, {"cu_seqlens": OnCPU(torch.tensor([0, 5, 9]))}),
            )
        )
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match=r"dropout must be 0 with attn_impl packed_varlen: got 0\.1"):
        packed_attention.packed_varlen(
            torch.nn.Identity(), query, key, value, None, cu_seqlens=torch.tensor([0, 9]), max_length=9, dropout=0.1
        )


def slow_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = torch.__version__ < (2, 12),  # whose kernel does it without being told
) -> torch.Tensor:
    """The documented meaning of torch's kernel: token i sees those from i - left to i + right (-1: all)."""
    assert max_q == max_k == starts.diff().max() and enable_gqa
    left, right = window_size
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
    token, other = torch.arange(len(q))[:, None], torch.arange(len(q))[None]
    of_sequence = torch.bucketize(torch.arange(len(q)), starts[1:], right=True)
    sees = (other <= token + right) & ((other >= token - left) | (left < 0))
    sees &= of_sequence[:, None] == of_sequence[None]
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)
