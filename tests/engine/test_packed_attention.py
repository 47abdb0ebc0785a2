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

from arealite.engine.packed_attention import PACKED_SDPA, check_packable, packed_sdpa

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
    torch.set_num_threads(1)
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
        segment_lengths=LENGTHS,
    ).logits[0]
    (packed * weights).sum().backward()
    torch.testing.assert_close(packed, padded, atol=2e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5 * max(scale, 1.0), rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (MambaForCausalLM, MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1)),
        (
            Qwen3NextForCausalLM,
            Qwen3NextConfig(**SIZES, layer_types=["linear_attention", "full_attention", "full_attention"]),
        ),
    ],
)
def test_models_that_mix_tokens_otherwise_are_refused(make: type, config: object) -> None:
    with torch.device("meta"):
        model = make(config)
    with pytest.raises(ValueError, match="must be full or sliding-window attention"):
        check_packable(model)


@pytest.mark.parametrize(
    ("make", "config", "kind"),
    [
        (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=DYNAMIC), "dynamic"),
        (Phi3ForCausalLM, Phi3Config(**SIZES, pad_token_id=0, rope_parameters=LONGROPE), "longrope"),
    ],
    ids=["dynamic", "longrope"],
)
def test_rotary_embeddings_that_the_longest_row_changes_are_refused(make: type, config: object, kind: str) -> None:
    with torch.device("meta"):
        model = make(config)
    with pytest.raises(ValueError, match=f"must not depend on the longest row: got rope_type {kind}"):
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
        packed_sdpa(torch.nn.Identity(), query, query, query, None, segment_lengths=[5], softcap=50.0)


def test_scaling_is_honoured() -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 8).unbind(0)
    attention = packed_sdpa(torch.nn.Identity(), query, key, value, None, segment_lengths=[5], scaling=0.5)[0]
    scores = (query @ key.transpose(2, 3) * 0.5).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(attention, (scores.softmax(-1) @ value).transpose(1, 2))
