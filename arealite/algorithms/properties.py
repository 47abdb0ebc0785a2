"""Properties that every loss and every advantage function must have, tried on small inputs in float64.

A property raises Violation where it does not hold. Like the actor, it leaves out the losses of masked tokens, and takes
the gradient of the sum of c times loss, so that tokens with different weights c can't hide each other's errors.
"""

# B rows, T padded tokens, N packed tokens, S completions

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from arealite.utils.tensors import pack_rows, unpack_rows

LossFn = Callable[[torch.Tensor, TensorDict], tuple[torch.Tensor, dict[str, torch.Tensor]]]
AdvantageFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Results = dict[str, torch.Tensor]

POISON = (torch.nan, torch.inf, -torch.inf, 1e30)
_READ = ("logprobs", "proximal_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")
_SHOWN = ("loss_mask", *_READ, "rewards", "group_index", "num_tokens")
_FAR = [(key, -100.0) for key in _READ[:3]] + [("rollout_logprobs", -torch.inf)]
_WAYS_OUT = (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__float__)
_RTOL = 1e-5  # of 1 + |value|; a loss may compute in float32


class Violation(Exception):
    """By how much a property does not hold, and for which input."""


def random_rows(seed: int, counts: Sequence[int] = (3, 1, 0, 2, 2)) -> TensorDict:
    """Return rows `[B, T]` with prompts, replies of an environment and padding, and as many trained tokens as given."""
    generator = torch.Generator().manual_seed(seed)
    B, T = len(counts), max(counts) + 4

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(B, T, generator=generator, dtype=torch.float64)

    places_BT = uniform(0.0, 1.0)
    places_BT[:, 0] = places_BT[:, -2:] = 2.0  # a prompt, and what follows the completion
    mask_BT = places_BT.argsort(dim=1).argsort(dim=1) < torch.tensor(counts)[:, None]
    proximal_BT = uniform(-2.5, -0.9)
    advantages_B = torch.tensor([1.3, -0.7, 0.9, -1.6, 0.0], dtype=torch.float64).repeat(B)[:B]
    rows = {
        "logprobs": proximal_BT + uniform(-0.8, 0.8),
        "proximal_logprobs": proximal_BT,
        "rollout_logprobs": proximal_BT + uniform(-0.5, 0.5),
        "ref_logprobs": proximal_BT + uniform(-0.5, 0.5),
        "advantages": torch.where(mask_BT, advantages_B[:, None], 0.0),
        "loss_mask": mask_BT,
        "attention_mask": torch.arange(T) < torch.randint(T - 2, T + 1, (B, 1), generator=generator),
        "input_ids": torch.randint(9, (B, T), generator=generator),
        "corrections": uniform(0.5, 1.5),
        "token_weights": uniform(0.5, 1.5),
    }
    return TensorDict(rows, batch_size=[B])


def evaluate(loss_fn: LossFn, rows: TensorDict, split: Iterable[Sequence[int]] | None = None) -> Results:
    """Return `losses`, `gradient` and statistics `[B, T]` of rows `[B, T]`, packed into micro-batches of given rows."""
    micro_batches = [pack_rows(rows, indices) for indices in split or [range(len(rows))]]
    results = [_evaluate(loss_fn, one.packed) for one in micro_batches]
    names = [name for name in results[0] if all(name in result for result in results)]
    return {name: unpack_rows([result[name] for result in results], micro_batches, rows) for name in names}


class _Gradients(TorchFunctionMode):
    """Refuses to turn a tensor with a gradient into numbers, which have none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WAYS_OUT and args[0].requires_grad:
            raise Violation(f"a loss must compute with tensors: got {func.__name__}(), which loses the gradient")
        return func(*args, **(kwargs or {}))


def _evaluate(loss_fn: LossFn, packed: TensorDict) -> Results:
    """Return `losses`, `gradient` and statistics `[N]`, and check all that does not need a second call."""
    leaf, mask_N = packed["logprobs"].clone().requires_grad_(), packed["loss_mask"]
    logprobs, batch = leaf.clone(), packed.exclude("logprobs").clone()
    with _Gradients():
        result = loss_fn(logprobs, batch)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise Violation(f"a loss must return (token losses, statistics): got {type(result).__name__}")
    losses, statistics = result
    for name, value in {"token losses": losses, **statistics}.items():
        _check_shape(name, value, mask_N)
        if value.requires_grad and value is not losses:
            raise Violation(f"statistics must have no gradient: got {name} with one")
    _check_unchanged(packed, {**batch, "logprobs": logprobs})
    total = (packed["token_weights"] * torch.where(mask_N, losses, 0.0)).sum()
    (gradient,) = torch.autograd.grad(total, leaf) if total.requires_grad else (torch.zeros_like(leaf),)
    return {"losses": losses.detach(), "gradient": gradient, **statistics}


def check_form(loss_fn: LossFn, rows: TensorDict) -> None:
    """A loss returns what the actor expects, changes no input, and returns the same again."""
    _expect_equal("when called again", rows, evaluate(loss_fn, rows), evaluate(loss_fn, rows))


def check_split(loss_fn: LossFn, rows: TensorDict) -> None:
    """No row's losses depend on other rows, or on the order of rows."""
    whole, order = evaluate(loss_fn, rows), [*range(len(rows))]
    for split in ([[row] for row in order], [order[1:] + order[:1]], [order[:0:-1], order[:1]]):
        _expect_equal(f"in micro-batches of rows {split} instead of one", rows, evaluate(loss_fn, rows, split), whole)


def check_masked(loss_fn: LossFn, rows: TensorDict) -> None:
    """Neither what masked positions hold nor how many there are plays a part."""
    generator = torch.Generator().manual_seed(1)
    repeats_BT = torch.where(rows["loss_mask"], 1, torch.randint(1, 4, rows["loss_mask"].shape, generator=generator))
    columns = {
        key: pad_sequence([row.repeat_interleave(n) for row, n in zip(column, repeats_BT)], batch_first=True)
        for key, column in rows.items()
    }
    longer, short = TensorDict(columns, batch_size=rows.batch_size), evaluate(loss_fn, rows)
    mask_BT = longer["loss_mask"]
    expected = {name: value.new_zeros(mask_BT.shape) for name, value in short.items()}
    for name, value in short.items():
        expected[name][mask_BT] = value[rows["loss_mask"]]
    _expect_equal("with longer prompts and replies of an environment", longer, evaluate(loss_fn, longer), expected)
    for key, poison in product(_READ, POISON):
        poisoned = longer.clone().set(key, torch.where(mask_BT, longer[key], poison))
        got, when = evaluate(loss_fn, poisoned), f"with {poison} in masked {key}"
        _expect_equal(when, poisoned, got, expected)
        gradient = {"gradient": got["gradient"]}
        is_right_BT = mask_BT | (got["gradient"] == 0)
        _expect(is_right_BT, f"the gradient by masked logprobs must be 0 {when}", poisoned, gradient)


def check_finite(loss_fn: LossFn, rows: TensorDict) -> None:
    """One token far off, or with probability 1, makes nothing infinite in float32."""
    mask_BT = rows["loss_mask"]
    first_BT = mask_BT & (mask_BT.cumsum(dim=1) == 1)  # of each row
    rows = rows.apply(lambda one: one.float() if one.is_floating_point() else one)
    cases = [(f"where {key} are {gap:g} off", {key: rows[key] + gap}) for key, gap in _FAR]
    cases.append(("where the probability is 1", {key: torch.zeros_like(rows[key]) for key in _READ[:4]}))
    for told, columns in cases:
        far = rows.clone().update({key: torch.where(first_BT, value, rows[key]) for key, value in columns.items()})
        for name, value in evaluate(loss_fn, far).items():
            _expect(value.isfinite() | ~mask_BT, f"{name} must be finite {told}", far, {name: value})


def check_sign(loss_fn: LossFn, rows: TensorDict) -> None:
    """Where all policies are equal, the gradient raises the logprob of some token of a positive advantage, or lowers
    that of a negative one."""
    equal = rows.clone().update(dict.fromkeys(_READ[1:4], rows["logprobs"]))
    gradient_BT = evaluate(loss_fn, equal)["gradient"]
    if not (gradient_BT * rows["advantages"] < 0).any():
        got = "those of +advantage" if gradient_BT.any() else "no gradient by logprobs"
        raise Violation(f"where all ratios are 1, gradients must have the sign of -advantage: got {got}")


def _expect_equal(when: str, inputs: Results | TensorDict, got: Results, expected: Results) -> None:
    """Expect the same results of trained tokens or completions; only a statistic may be nan."""
    is_trained = inputs["loss_mask"] if "loss_mask" in inputs else inputs["num_tokens"] > 0
    for name in [name for name in expected if name in got]:
        results = {name: got[name].double(), "expected": expected[name].double()}
        is_equal = torch.isclose(results[name], results["expected"], rtol=_RTOL, atol=_RTOL, equal_nan=True)
        if name in ("losses", "gradient", "advantages"):
            is_equal &= results[name].isfinite()
        _expect(is_equal | ~is_trained, f"{name} must be the same {when}", inputs, results)


def _expect(holds: torch.Tensor, told: str, inputs: Results | TensorDict, results: Results) -> None:
    """Raise for the first token `[B, T]`, with its row, or completion `[S]` for which something does not hold."""
    if not holds.all():
        place = tuple((~holds).nonzero()[0].tolist())
        shown = {key: inputs[key] for key in _SHOWN if key in inputs}
        got, given = (
            ", ".join(f"{name} {value[place]:.6g}" for name, value in values.items()) for values in (results, shown)
        )
        where = f"token {place[1]} of row {place[0]}" if len(place) > 1 else f"completion {place[0]}"
        raise Violation(f"{told}: got {got} for {where}, with {given}")


def _check_shape(name: str, value: Any, like: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != like.shape:
        got = tuple(value.shape) if isinstance(value, torch.Tensor) else f"{value!r:.40}"
        raise Violation(f"{name} must be a tensor of shape {tuple(like.shape)}: got {got}")


def _check_unchanged(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    for name, value in before.items():
        if not torch.isclose(after[name].detach(), value, rtol=0, atol=0, equal_nan=True).all():
            raise Violation(f"{name} must stay as it was given: got another in its place")


def _advantages(advantage_fn: AdvantageFn, answers: Results) -> Results:
    """Return `advantages [S]` of `rewards`, `group_index`, `num_tokens` `[S]`, finite for what is trained on."""
    given = {name: value.clone() for name, value in answers.items()}
    advantages_S = advantage_fn(*given.values())
    _check_shape("advantages", advantages_S, answers["rewards"])
    _check_unchanged(answers, given)
    is_finite_S = advantages_S.isfinite() | (answers["num_tokens"] == 0)
    _expect(is_finite_S, "advantages must be finite", answers, {"advantages": advantages_S})
    return {"advantages": advantages_S.double()}


def random_answers(seed: int) -> Results:
    """Return `rewards`, `group_index` and `num_tokens` `[S]` of groups of 4, 1 and 3; one has no trained token."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens_S = torch.randint(1, 9, (8,), generator=generator)
    num_tokens_S[2] = 0
    groups_S = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2])
    return {"rewards": torch.rand(8, generator=generator), "group_index": groups_S, "num_tokens": num_tokens_S}


def check_advantage_form(advantage_fn: AdvantageFn, answers: Results) -> None:
    """An advantage function returns one number per completion, changes no input, and returns the same again."""
    first = _advantages(advantage_fn, answers)
    _expect_equal("when called again", answers, _advantages(advantage_fn, answers), first)


def check_advantage_order(advantage_fn: AdvantageFn, answers: Results) -> None:
    """Neither the order of completions nor the numbers of groups matter."""
    first, groups_S = _advantages(advantage_fn, answers), answers["group_index"]
    mixed, expected = ({name: value.roll(1) for name, value in one.items()} for one in (answers, first))
    _expect_equal("in another order", mixed, _advantages(advantage_fn, mixed), expected)
    renamed = answers | {"group_index": groups_S.max() - groups_S}
    _expect_equal("with groups renumbered", renamed, _advantages(advantage_fn, renamed), first)


def check_advantage_finite(advantage_fn: AdvantageFn, answers: Results) -> None:
    """Groups whose rewards are all equal, or nearly, and negative or large rewards have finite advantages."""
    for rewards in ([0.0] * 8, [0.1] * 8, [0.35] * 7 + [0.95], [-1.0] * 8, [1e6, 1e6 + 1] * 4):
        _advantages(advantage_fn, answers | {"rewards": torch.tensor(rewards)})


LOSS_PROPERTIES: dict[str, Callable[[LossFn, TensorDict], None]] = {
    "one loss per token, of tensors alone; statistics without gradient; inputs unchanged": check_form,
    "equal for any split into micro-batches and any order of rows": check_split,
    "what masked positions hold (nan, inf), and how many there are, plays no part": check_masked,
    "finite at log ratios of +-100, a rollout logprob of -inf, a probability of 1": check_finite,
    "at ratio 1 there is a gradient, with the sign of -advantage": check_sign,
}
ADVANTAGE_PROPERTIES: dict[str, Callable[[AdvantageFn, Results], None]] = {
    "one finite number per completion; inputs unchanged": check_advantage_form,
    "equal for any order of completions and numbers of groups": check_advantage_order,
    "finite where rewards are equal, nearly equal, negative, large": check_advantage_finite,
}
