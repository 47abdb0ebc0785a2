"""Properties that every loss must have, tried on small inputs in float64.

Like the actor, they leave out the losses of masked tokens, and take the gradient of the sum of c times loss, so that
tokens with different weights c can't hide each other's errors.
"""

# B rows, T padded tokens, N packed tokens

from collections.abc import Callable, Iterable, Sequence
from itertools import product

import torch
from tensordict import TensorDict

from arealite.algorithms.objectives import TokenLossFn
from arealite.utils.tensors import pack_rows, unpack_rows

Results = dict[str, torch.Tensor]
Check = Callable[[TokenLossFn, TensorDict], None]

_SIZES = ((2, 1, 0), (3, 1, 0, 2, 2), (1, 4, 2, 3))  # trained tokens per row, small ones first
_POISON = (torch.nan, torch.inf, -torch.inf, 1e30)
_READ = ("logprobs", "proximal_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")
_FAR = [(key, -100.0) for key in _READ[:3]] + [("rollout_logprobs", -torch.inf)]
_RTOL = 1e-5  # of 1 + |value|; a loss may compute in float32


class Violation(Exception):
    """By how much a property does not hold, and for which input."""


def on_small_inputs(check: Check, loss_fn: TokenLossFn) -> None:
    """Try a property of `LOSS_PROPERTIES`, which raises Violation, or what the loss raises."""
    for seed, counts in enumerate(_SIZES):
        check(loss_fn, random_rows(seed, counts))


def random_rows(seed: int, counts: Sequence[int]) -> TensorDict:
    """Return rows `[B, T]` with as many trained tokens as given, after and between masked ones, and with padding."""
    generator = torch.Generator().manual_seed(seed)
    B, T = len(counts), 2 * max(counts) + 4

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(B, T, generator=generator, dtype=torch.float64)

    mask_BT = (torch.arange(T) % 3 > 0).expand(B, T)
    mask_BT = mask_BT & (mask_BT.cumsum(dim=1) <= torch.tensor(counts)[:, None])
    proximal_BT = uniform(-2.5, -0.9)
    rows = {
        "logprobs": proximal_BT + uniform(-0.8, 0.8),
        "proximal_logprobs": proximal_BT,
        "rollout_logprobs": proximal_BT + uniform(-0.5, 0.5),
        "ref_logprobs": proximal_BT + uniform(-0.5, 0.5),
        "advantages": torch.where(mask_BT, uniform(-1.6, 1.6)[:, :1], 0.0),
        "loss_mask": mask_BT,
        "attention_mask": torch.arange(T) < torch.randint(T - 2, T + 1, (B, 1), generator=generator),
        "input_ids": torch.randint(9, (B, T), generator=generator),
        "corrections": uniform(0.5, 1.5),
        "token_weights": uniform(0.5, 1.5),
    }
    return TensorDict(rows, batch_size=[B])


def evaluate(loss_fn: TokenLossFn, rows: TensorDict, split: Iterable[Sequence[int]] | None = None) -> Results:
    """Return `losses`, `gradient` and statistics `[B, T]` of rows `[B, T]`, packed into micro-batches of given rows."""
    micro_batches = [pack_rows(rows, indices) for indices in split or [range(len(rows))]]
    results = [_evaluate(loss_fn, one.packed) for one in micro_batches]
    names = [name for name in results[0] if all(name in result for result in results)]
    return {name: unpack_rows([result[name] for result in results], micro_batches, rows) for name in names}


def _evaluate(loss_fn: TokenLossFn, packed: TensorDict) -> Results:
    """Return `losses`, `gradient` and statistics `[N]`, and check all that does not need a second call."""
    leaf, mask_N = packed["logprobs"].clone().requires_grad_(), packed["loss_mask"]
    logprobs, batch = leaf.clone(), packed.exclude("logprobs").clone()
    result = loss_fn(logprobs, batch)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise Violation(f"a loss must return (token losses, statistics): got {type(result).__name__}")
    losses, statistics = result
    for name, value in {"token losses": losses, **statistics}.items():
        if not isinstance(value, torch.Tensor) or value.shape != mask_N.shape:
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else f"{value!r:.40}"
            raise Violation(f"{name} must be a tensor of shape {tuple(mask_N.shape)}: got {got}")
        if value.requires_grad and value is not losses:
            raise Violation(f"statistics must have no gradient: got {name} with one")
    for name, value in {**batch, "logprobs": logprobs}.items():
        if not torch.isclose(value.detach(), packed[name], rtol=0, atol=0, equal_nan=True).all():
            raise Violation(f"{name} must stay as it was given: got another in its place")
    total = (packed["token_weights"] * torch.where(mask_N, losses, 0.0)).sum()
    (gradient,) = torch.autograd.grad(total, leaf) if total.requires_grad else (torch.zeros_like(leaf),)
    return {"losses": losses.detach(), "gradient": gradient, **statistics}


def check_form(loss_fn: TokenLossFn, rows: TensorDict) -> None:
    """A loss returns what the actor expects, changes no input, and returns the same again."""
    _expect_equal("when called again", rows, evaluate(loss_fn, rows), evaluate(loss_fn, rows))


def check_split(loss_fn: TokenLossFn, rows: TensorDict) -> None:
    """No row's losses depend on other rows, or on the order of rows."""
    whole, order = evaluate(loss_fn, rows), [*range(len(rows))]
    for split in ([[row] for row in order], [order[1:] + order[:1]], [order[:0:-1], order[:1]]):
        _expect_equal(f"in micro-batches of rows {split} instead of one", rows, evaluate(loss_fn, rows, split), whole)


def check_masked(loss_fn: TokenLossFn, rows: TensorDict) -> None:
    """Neither what masked positions hold nor how many there are plays a part."""
    is_trained_T = rows["loss_mask"].any(dim=0)
    columns = torch.arange(len(is_trained_T)).repeat_interleave(torch.where(is_trained_T, 1, 3))
    longer = rows.apply(lambda one: one[:, columns])
    mask_BT = longer["loss_mask"]
    expected = {
        name: torch.zeros_like(mask_BT, dtype=value.dtype).masked_scatter(mask_BT, value[rows["loss_mask"]])
        for name, value in evaluate(loss_fn, rows).items()
    }
    for key, poison in product(_READ, _POISON):
        poisoned = longer.clone().set(key, torch.where(mask_BT, longer[key], poison))
        got, when = evaluate(loss_fn, poisoned), f"with more masked positions, and {poison} in their {key}"
        _expect_equal(when, poisoned, got, expected)
        _expect(mask_BT | (got["gradient"] == 0), f"the gradient by masked logprobs must be 0 {when}", got)


def check_finite(loss_fn: TokenLossFn, rows: TensorDict) -> None:
    """One token far off, or with probability 1, makes nothing infinite in float32."""
    mask_BT = rows["loss_mask"]
    first_BT = mask_BT & (mask_BT.cumsum(dim=1) == 1)  # of each row
    rows = rows.apply(lambda one: one.float() if one.is_floating_point() else one)
    cases = [(f"where {key} are {gap:g} off", {key: rows[key] + gap}) for key, gap in _FAR]
    cases.append(("where the probability is 1", {key: torch.zeros_like(rows[key]) for key in _READ[:4]}))
    for where, columns in cases:
        far = rows.clone().update({key: torch.where(first_BT, value, rows[key]) for key, value in columns.items()})
        for name, value in evaluate(loss_fn, far).items():
            _expect(value.isfinite() | ~mask_BT, f"{name} must be finite {where}", {name: value})


def check_sign(loss_fn: TokenLossFn, rows: TensorDict) -> None:
    """Where all policies are equal, the gradient raises the logprob of some token of a positive advantage, or lowers
    that of a negative one."""
    equal = rows.clone().update(dict.fromkeys(_READ[1:4], rows["logprobs"]))
    gradient_BT = evaluate(loss_fn, equal)["gradient"]
    if not (gradient_BT * rows["advantages"] < 0).any():
        got = "those of +advantage" if gradient_BT.any() else "no gradient by logprobs"
        raise Violation(f"where all ratios are 1, gradients must have the sign of -advantage: got {got}")


def _expect_equal(when: str, rows: TensorDict, got: Results, expected: Results) -> None:
    """Expect the same results of trained tokens; only a statistic may be nan."""
    for name in [name for name in expected if name in got]:
        is_equal = torch.isclose(got[name], expected[name], rtol=_RTOL, atol=_RTOL, equal_nan=True)
        if name in ("losses", "gradient"):
            is_equal &= got[name].isfinite()
        results = {name: got[name], "expected": expected[name]}
        _expect(is_equal | ~rows["loss_mask"], f"{name} must be the same {when}", results)


def _expect(holds_BT: torch.Tensor, rule: str, results: Results) -> None:
    """Raise for the first token for which something does not hold."""
    if not holds_BT.all():
        row, token = (~holds_BT).nonzero()[0].tolist()
        got = ", ".join(f"{name} {value[row, token]:.6g}" for name, value in results.items())
        raise Violation(f"{rule}: got {got} for token {token} of row {row}")


LOSS_PROPERTIES: dict[str, Check] = {
    "one loss per token, of tensors alone; statistics without gradient; inputs unchanged": check_form,
    "equal for any split into micro-batches and any order of rows": check_split,
    "what masked positions hold (nan, inf), and how many there are, plays no part": check_masked,
    "finite at log ratios of +-100, a rollout logprob of -inf, a probability of 1": check_finite,
    "at ratio 1 there is a gradient, with the sign of -advantage": check_sign,
}
