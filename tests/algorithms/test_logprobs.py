import math

import pytest
import torch

from arealite.algorithms.logprobs import (
    CHUNK_TOKENS,
    gather_logprobs,
    gather_logprobs_entropy,
    packed_logprobs,
    packed_logprobs_entropy,
    trained_tokens,
)


@pytest.mark.parametrize("num_tokens", [1, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 7])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_entropy_and_gradient_equal_log_softmax(num_tokens: int, temperature: float) -> None:
    torch.manual_seed(num_tokens)
    logits = torch.randn(num_tokens, 11) * 3
    labels, weights = torch.randint(0, 11, (num_tokens,)), torch.randn(num_tokens)
    ours, reference = logits.clone().requires_grad_(), logits.double().requires_grad_()
    logprobs, entropy = gather_logprobs_entropy(ours, labels, temperature)
    expected = (reference / temperature).log_softmax(-1)
    close = {"atol": 1e-5, "rtol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(logprobs, expected.gather(-1, labels[:, None])[:, 0], **close)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1).detach(), **close)
    (logprobs * weights).sum().backward()
    (expected.gather(-1, labels[:, None])[:, 0] * weights).sum().backward()
    torch.testing.assert_close(ours.grad, reference.grad, **close)


def test_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4], [0.0, 1e4]])
    logprobs, entropy = gather_logprobs_entropy(logits, torch.tensor([0, 0]))
    assert logprobs.tolist() == [0.0, -1e4] and entropy.tolist() == [0.0, 0.0]


def test_bfloat16_logits_give_float32_logprobs_and_bfloat16_gradients() -> None:
    logits = torch.randn(5, 7, dtype=torch.bfloat16).requires_grad_()
    logprobs = gather_logprobs(logits, torch.arange(5))
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, logits.float().log_softmax(-1)[torch.arange(5), torch.arange(5)])
    logprobs.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16


def test_logprobs_belong_to_the_token_they_are_about() -> None:
    # Sequences [0, 1] and [1, 0, 0]; each position predicts token 1 with probability 3/4.
    logits = torch.tensor([[0.0, math.log(3.0)]]).expand(5, 2)
    input_ids, cu_seqlens = torch.tensor([0, 1, 1, 0, 0]), torch.tensor([0, 2, 5], dtype=torch.int32)
    expected = torch.tensor([0.0, math.log(0.75), 0.0, math.log(0.25), math.log(0.25)])
    torch.testing.assert_close(packed_logprobs(logits, input_ids, cu_seqlens), expected)
    logprobs, entropy = packed_logprobs_entropy(logits, input_ids, cu_seqlens)
    torch.testing.assert_close(logprobs, expected)
    assert entropy[[0, 2]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(entropy[1].item(), -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


def test_only_predicted_real_tokens_are_trained_on() -> None:
    attention_mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    loss_mask = torch.ones(2, 4)
    assert trained_tokens(attention_mask, loss_mask).tolist() == [
        [False, True, True, False],
        [False, False, True, True],
    ]
