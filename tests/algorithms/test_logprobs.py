import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arealite.algorithms import logprobs as logprobs_module
from arealite.algorithms.logprobs import (
    KeptSets,
    LazyLogits,
    gather_logprobs,
    gather_logprobs_entropy,
    packed_logprobs,
    packed_logprobs_entropy,
    trained_tokens,
)

CLOSE = {"atol": 1e-6, "rtol": 1e-6, "check_dtype": False}


def of_logits(logits_NV: torch.Tensor) -> LazyLogits:
    """Wrap logits as hidden states of an output layer that leaves them as they are."""
    return LazyLogits(logits_NV, torch.eye(logits_NV.shape[1], dtype=logits_NV.dtype))


def output_layer(num_tokens: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Return hidden states, weight and bias whose logits are a few units wide."""
    generator = torch.Generator().manual_seed(num_tokens + vocabulary)
    shapes = (num_tokens, 6), (vocabulary, 6), (vocabulary,)
    return tuple(torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)


def slow(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    kept: list[list[int]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprobs and entropies token by token."""
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for row, (vector, label) in enumerate(zip(hidden, labels.tolist())):
        logits = weight @ vector if bias is None else weight @ vector + bias
        logits = logits * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / temperature
        ids = kept[row] if kept and kept[row] else range(len(logits))
        found[0].append(logits[label] - logits[list(ids)].logsumexp(0))
        found[1].append(-(logits.softmax(0) * logits.log_softmax(0)).sum())
    return torch.stack(found[0]), torch.stack(found[1])


@pytest.mark.parametrize("vocabulary", [11, 2500], ids=["one block", "three blocks"])
@pytest.mark.parametrize("changes", [{}, {"scale": 0.3, "softcap": 2.0}, {"softcap": 4.0}], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 3e-5)], ids=str)
def test_logprobs_entropies_and_gradients_equal_a_slow_float64_reference(
    monkeypatch: pytest.MonkeyPatch,
    vocabulary: int,
    changes: dict[str, float],
    has_bias: bool,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    monkeypatch.setattr(logprobs_module, "BLOCK_VALUES", 1)
    tensors = output_layer(7, vocabulary, dtype)[: 3 if has_bias else 2]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    labels, weights = torch.arange(7) * vocabulary // 7, torch.linspace(-1.0, 2.0, 14).view(2, 7)
    bias = tensors[2] if has_bias else None
    found = gather_logprobs_entropy(LazyLogits(*tensors[:2], bias, **changes), labels, 0.7, entropy_grad=True)
    expected = slow(*exact[:2], exact[2] if has_bias else None, labels, temperature=0.7, **changes)
    for ours, reference in zip(found, expected):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, reference, atol=tolerance, rtol=tolerance, check_dtype=False)
    (torch.stack(found) * weights).sum().backward()
    (torch.stack(expected) * weights).sum().backward()
    for ours, reference in zip(tensors, exact):
        atol = tolerance * reference.grad.abs().max().item()
        torch.testing.assert_close(ours.grad, reference.grad, atol=atol, rtol=tolerance, check_dtype=False)


@given(
    kept=st.lists(st.sets(st.integers(0, 1499), max_size=6), min_size=1, max_size=5),
    whole_entropy=st.booleans(),
    temperature=st.floats(0.3, 2.0),
)
@settings(max_examples=settings.default.max_examples // 4)
def test_a_kept_set_restricts_the_softmax_of_the_logprob_alone(
    kept: list[set[int]], whole_entropy: bool, temperature: float
) -> None:
    ids = [sorted(one) for one in kept]
    labels = torch.tensor([one[-1] if one else 7 for one in ids])
    sets = KeptSets(torch.tensor([i for one in ids for i in one], dtype=torch.long), torch.tensor(list(map(len, ids))))
    tensors = output_layer(len(kept), 1500, torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs_module, "BLOCK_VALUES", 1)  # two blocks
        if whole_entropy:
            found = gather_logprobs_entropy(LazyLogits(*tensors), labels, temperature, kept=sets, entropy_grad=True)
        else:
            found = (gather_logprobs(LazyLogits(*tensors), labels, temperature, kept=sets),)
        expected = slow(*tensors, labels, temperature=temperature, kept=ids)[: len(found)]
        for ours, reference in zip(found, expected):
            torch.testing.assert_close(ours, reference, atol=1e-9, rtol=1e-9)
        for ours, reference in zip(
            torch.autograd.grad(sum(one.sum() for one in found), tensors),
            torch.autograd.grad(sum(one.sum() for one in expected), tensors),
        ):
            torch.testing.assert_close(ours, reference, atol=1e-9, rtol=1e-9)


def test_sets_of_packed_tokens_belong_to_the_token_that_was_sampled_from_them() -> None:
    # Sequences [0, 1, 2] and [1, 0]: token 1 of the first was sampled from {1, 3}, token 0 of the second from {0, 1}.
    logits = torch.arange(20.0).view(5, 4).sin()
    input_ids, cu_seqlens = torch.tensor([0, 1, 2, 1, 0]), torch.tensor([0, 3, 5], dtype=torch.int32)
    kept = KeptSets(torch.tensor([1, 3, 0, 1]), torch.tensor([0, 2, 0, 0, 2]))
    found = packed_logprobs(of_logits(logits), input_ids, cu_seqlens, kept=kept)
    expected = [
        0.0,
        (logits[0, 1] - logits[0, [1, 3]].logsumexp(0)).item(),
        logits[1].log_softmax(0)[2].item(),
        0.0,
        (logits[3, 0] - logits[3, [0, 1]].logsumexp(0)).item(),
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert packed_logprobs_entropy(of_logits(logits), input_ids, cu_seqlens, kept=kept)[0].tolist() == found.tolist()


class ElsewhereMask(torch.Tensor):
    """A mask that says that it is on a GPU, where the host may not ask how many tokens it has."""

    device = torch.device("cuda")
    __torch_function__ = torch._C._disabled_torch_function_impl  # what is computed from it says where it is

    def roll(self, shifts: int) -> torch.Tensor:
        return super().roll(shifts).as_subclass(ElsewhereMask)


@given(mask=st.lists(st.booleans(), min_size=7, max_size=7), has_sets=st.booleans(), is_on_gpu=st.booleans())
@settings(max_examples=settings.default.max_examples // 4)
def test_tokens_under_a_mask_are_as_without_it_and_others_are_0(
    mask: list[bool], has_sets: bool, is_on_gpu: bool
) -> None:
    tensors = output_layer(7, 30, torch.float64)
    input_ids, cu_seqlens = torch.tensor([3, 1, 2, 9, 1, 0, 29]), torch.tensor([0, 3, 7], dtype=torch.int32)
    kept = KeptSets(torch.tensor([1, 3, 0, 1, 5]), torch.tensor([0, 2, 0, 0, 3, 0, 0])) if has_sets else None
    mask_N = torch.tensor(mask)
    given_N = mask_N.as_subclass(ElsewhereMask) if is_on_gpu else mask_N
    tokens = LazyLogits(*tensors), input_ids, cu_seqlens, 0.7
    found = packed_logprobs_entropy(*tokens, kept=kept, mask=given_N, entropy_grad=True)
    expected = [one * mask_N for one in packed_logprobs_entropy(*tokens, kept=kept, entropy_grad=True)]
    for ours, reference in zip(found, expected):
        torch.testing.assert_close(ours, reference, atol=1e-12, rtol=1e-12)
    weights = torch.linspace(-1.0, 2.0, 7)
    gradients = (torch.autograd.grad(sum((weights * one).sum() for one in two), tensors) for two in (found, expected))
    for ours, reference in zip(*gradients):
        torch.testing.assert_close(ours, reference, atol=1e-12, rtol=1e-12)


def test_logits_of_masked_tokens_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    block = LazyLogits.block
    monkeypatch.setattr(LazyLogits, "block", lambda self, *ids: rows.append(len(self.hidden_NH)) or block(self, *ids))
    mask_N = torch.tensor([False, False, True, True, False])
    found = packed_logprobs(
        LazyLogits(*output_layer(5, 4)), torch.arange(5) % 4, torch.tensor([0, 5], dtype=torch.int32), mask=mask_N
    )
    found.sum().backward()
    assert rows == [2, 2]


def test_only_what_is_trained_gets_a_gradient() -> None:
    hidden, weight, bias = output_layer(3, 5)
    frozen = LazyLogits(hidden, weight.detach(), bias.detach())
    gather_logprobs(frozen, torch.arange(3)).sum().backward()
    assert hidden.grad is not None and weight.grad is None and bias.grad is None
    entropy = gather_logprobs_entropy(frozen, torch.arange(3))[1]
    assert not entropy.requires_grad
    with torch.no_grad():
        assert not gather_logprobs(LazyLogits(hidden, weight), torch.arange(3)).requires_grad


def test_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4], [0.0, 1e4]], requires_grad=True)
    logprobs, entropy = gather_logprobs_entropy(of_logits(logits), torch.tensor([0, 0]), entropy_grad=True)
    assert logprobs.tolist() == [0.0, -1e4] and entropy.tolist() == [0.0, 0.0]
    (logprobs + entropy).sum().backward()
    assert logits.grad is not None and logits.grad.tolist() == [[0.0, 0.0], [1.0, -1.0]]


def test_no_token_has_no_logprob_and_no_gradient() -> None:
    hidden, weight, bias = output_layer(0, 5)
    logprobs, entropy = gather_logprobs_entropy(LazyLogits(hidden, weight, bias), torch.empty(0, dtype=torch.long))
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(5, 6)) and torch.equal(bias.grad, torch.zeros(5))


def test_bfloat16_rounds_logits_as_the_model_does_and_nothing_else() -> None:
    hidden, weight, _ = output_layer(5, 7, torch.bfloat16)
    logprobs = gather_logprobs(LazyLogits(hidden, weight), torch.arange(5))
    assert logprobs.dtype == torch.float32
    rounded = (hidden @ weight.t()).detach().float().requires_grad_()
    expected = rounded.log_softmax(-1)[torch.arange(5), torch.arange(5)]
    torch.testing.assert_close(logprobs, expected, **CLOSE)
    logprobs.sum().backward()
    expected.sum().backward()
    d_logits = rounded.grad.bfloat16().double()
    for ours, exact in ((hidden.grad, d_logits @ weight.double()), (weight.grad, d_logits.t() @ hidden.double())):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, exact.detach(), atol=1e-6, rtol=2**-8, check_dtype=False)


def test_a_gradient_of_the_weight_is_summed_in_float32() -> None:
    """2,000 tokens that pull the same way: a bfloat16 sum would stop growing at a few hundred."""
    hidden = torch.ones(2000, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    gather_logprobs(LazyLogits(hidden, weight), torch.zeros(2000, dtype=torch.long)).sum().backward()
    assert weight.grad.tolist() == [[1000.0], [-1000.0]]


def test_a_gradient_of_hidden_states_is_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 blocks that add 1/512 each to 1: a bfloat16 sum would stay at 1."""
    monkeypatch.setattr(logprobs_module, "BLOCK_VALUES", 1)
    weight = torch.full((64 * 1024, 1), -0.125, dtype=torch.bfloat16)
    weight[0] = 1.0
    hidden = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    gather_logprobs(LazyLogits(hidden, weight), torch.tensor([0])).sum().backward()
    assert hidden.grad.item() == 1.125


def test_logprobs_belong_to_the_token_they_are_about() -> None:
    # Sequences [0, 1] and [1, 0, 0]; each position predicts token 1 with probability 3/4.
    logits = of_logits(torch.tensor([[0.0, math.log(3.0)]]).expand(5, 2))
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
