"""Properties that every loss and every advantage function must have, tried on small inputs in float64.

A property raises Violation where it does not hold. Like the actor, it leaves out the losses of masked tokens, and takes
the gradient of the sum of c times loss, so that tokens with different weights c can't hide each other's errors.
"""

# B rows, T padded tokens, N packed tokens, S completions

from collections.abc import Callable, Iterable, Mapping, Sequence
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
_FAR = [(key, -100.0) for key in _READ[:3]] + [("rollout_logprobs", -torch.inf)]
_CUTS = (torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
_RTOL = 1e-5  # of 1 + |value|; a loss may compute in float32


class Violation(Exception):
    """By how much a property does not hold, and `columns [n]` of the tokens or completions for which it does not."""

    def __init__(self, told: str, columns: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(told)
        self.columns = columns or {}


class Remark(Violation):
    """The same for a property that a function may lack on purpose."""


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


def _evaluate(loss_fn: LossFn, packed: TensorDict) -> Results:
    """Return `losses`, `gradient` and statistics `[N]`, and check all that does not need a second call."""
    leaf, mask_N = packed["logprobs"].clone().requires_grad_(), packed["loss_mask"]
    logprobs, batch = leaf.clone(), packed.exclude("logprobs").clone()
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


def check_split(loss_fn: LossFn, rows: TensorDict, seed: int = 1) -> None:
    """No row's losses depend on other rows, or on the order of rows."""
    whole, generator = evaluate(loss_fn, rows), torch.Generator().manual_seed(seed)
    order = torch.randperm(len(rows), generator=generator).tolist()
    cut = int(torch.randint(len(rows), (1,), generator=generator))
    for split in ([[row] for row in range(len(rows))], [order], [part for part in (order[:cut], order[cut:]) if part]):
        told = f"in micro-batches of rows {split} instead of one"
        _expect_equal(told, rows, evaluate(loss_fn, rows, split), whole)


def check_masked_values(loss_fn: LossFn, rows: TensorDict) -> None:
    """What masked positions hold plays no part."""
    clean = evaluate(loss_fn, rows)
    for key in _READ:
        for value in POISON:
            poisoned = rows.clone().set(key, torch.where(rows["loss_mask"], rows[key], value))
            found, when = evaluate(loss_fn, poisoned), f"with {value} in masked {key}"
            _expect_equal(when, poisoned, found, clean)
            gradient = {"gradient": found["gradient"]}
            is_right_BT = rows["loss_mask"] | (gradient["gradient"] == 0)
            _expect(is_right_BT, f"the gradient by masked logprobs must be 0 {when}", poisoned, gradient)


def check_masked_counts(loss_fn: LossFn, rows: TensorDict, seed: int = 1) -> None:
    """How many masked positions there are, in prompts and in replies of an environment, plays no part."""
    short, mask_BT = evaluate(loss_fn, rows), rows["loss_mask"]
    generator = torch.Generator().manual_seed(seed)
    repeats_BT = torch.where(mask_BT, 1, torch.randint(1, 4, mask_BT.shape, generator=generator))
    longer = {
        key: pad_sequence([row.repeat_interleave(n) for row, n in zip(column, repeats_BT)], batch_first=True)
        for key, column in rows.items()
    }
    wide = evaluate(loss_fn, TensorDict(longer, batch_size=rows.batch_size))
    for name in wide:  # back to the places of the short rows
        short_BT = torch.zeros_like(wide[name][:, :1]).expand(mask_BT.shape).clone()
        short_BT[mask_BT] = wide[name][longer["loss_mask"]]
        wide[name] = short_BT
    _expect_equal("with longer prompts and replies of an environment", rows, wide, short)


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


class _Held(TorchFunctionMode):
    """Records what a first run cuts off from the gradient (detach, no_grad), and holds it in the runs after that."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []
        self.is_recorded, self.index = False, 0

    def run(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.index = 0
        with self:
            result = function()
        self.is_recorded = True
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) or (torch.is_grad_enabled() and func not in _CUTS):
            return result
        if not self.is_recorded:
            self.values.append(result.clone())
            return result
        self.index += 1
        return self.values[self.index - 1]


def check_gradient(loss_fn: LossFn, rows: TensorDict) -> None:
    """Autograd finds the gradient of the losses in which all that is detached is constant: central differences."""
    gradient_BT, held = evaluate(loss_fn, rows)["gradient"], _Held()

    def total(logprobs_BT: torch.Tensor) -> torch.Tensor:
        batch = pack_rows(rows.clone().set("logprobs", logprobs_BT), range(len(rows))).packed
        logprobs = batch["logprobs"].requires_grad_()
        losses = held.run(lambda: loss_fn(logprobs, batch.exclude("logprobs"))[0]).detach()
        return (batch["token_weights"] * torch.where(batch["loss_mask"], losses, 0.0)).sum()

    total(rows["logprobs"])
    for place in rows["loss_mask"].nonzero().tolist():
        found = gradient_BT[tuple(place)]
        for step in (1e-3, 1e-6):  # small steps drown in float32, large ones may cross a bound
            move_BT = torch.zeros_like(gradient_BT).index_put_(tuple(torch.tensor(place)), torch.tensor(step).double())
            expected = (total(rows["logprobs"] + move_BT) - total(rows["logprobs"] - move_BT)) / (2 * step)
            if abs(found - expected) <= 1e-3 * (1 + expected.abs()):
                break
        else:
            bad_BT = move_BT == 0
            columns = {"gradient": gradient_BT, "by differences": torch.where(bad_BT, torch.nan, expected)}
            _expect(bad_BT, "autograd must equal central differences", rows, columns)


def check_ratio_of_one(loss_fn: LossFn, rows: TensorDict) -> None:
    """Where all policies are equal, the gradient of a completion's losses is minus its advantage, up to a weight."""
    equal = rows.clone().update(dict.fromkeys(_READ[1:4], rows["logprobs"]))
    equal["token_weights"] = torch.ones_like(rows["logprobs"])
    result = {"gradient": evaluate(loss_fn, equal)["gradient"]}
    if rows["advantages"].any() and not result["gradient"].any():
        raise Violation("where all ratios are 1, losses must have a gradient by logprobs: got none")
    is_reversed_BT = result["gradient"] * rows["advantages"] > 0
    if is_reversed_BT[rows["advantages"] != 0].all():
        _expect(~is_reversed_BT, "where all ratios are 1, gradients must have the sign of -advantage", equal, result)
    try:
        _expect_equal("as -advantage where all ratios are 1", equal, result, {"gradient": -rows["advantages"]})
    except Violation as violation:
        raise Remark(str(violation), violation.columns) from None


def _expect_equal(when: str, rows: TensorDict, got: Results, expected: Results) -> None:
    """Expect the same results `[B, T]` of trained tokens; a statistic may be nan."""
    for name in [name for name in expected if name in got]:
        got_BT, expected_BT = got[name].double(), expected[name].double()
        is_equal_BT = _is_close(got_BT, expected_BT)
        if name in ("losses", "gradient"):
            is_equal_BT &= got_BT.isfinite()
        results = {name: got_BT, "expected": expected_BT}
        _expect(is_equal_BT | ~rows["loss_mask"], f"{name} must be the same {when}", rows, results)


def _expect(holds_BT: torch.Tensor, told: str, rows: TensorDict, results: Results) -> None:
    """Raise Violation with the first row for which something does not hold."""
    if not holds_BT.all():
        row, token = (~holds_BT).nonzero()[0].tolist()
        real_T = rows["attention_mask"][row]
        columns = {key: rows[key][row][real_T] for key in ("loss_mask", *_READ[:3], "advantages")}
        columns |= {key: value[row][real_T] for key, value in results.items()}
        got = ", ".join(f"{name} {value[row, token]:.6g}" for name, value in results.items())
        raise Violation(f"{told}: got {got} for token {token} of row {row}", columns)


def _check_shape(name: str, value: Any, like: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != like.shape:
        got = tuple(value.shape) if isinstance(value, torch.Tensor) else f"{value!r:.40}"
        raise Violation(f"{name} must be a tensor of shape {tuple(like.shape)}: got {got}")


def _check_unchanged(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    for name, value in before.items():
        if not torch.isclose(after[name].detach(), value, rtol=0, atol=0, equal_nan=True).all():
            raise Violation(f"{name} must stay as it was given: got another in its place")


def _advantages(advantage_fn: AdvantageFn, answers: Results) -> torch.Tensor:
    """Return the advantages `[S]` of `rewards`, `group_index`, `num_tokens` `[S]`, finite for what is trained on."""
    given = {name: value.clone() for name, value in answers.items()}
    advantages_S = advantage_fn(*given.values())
    _check_shape("advantages", advantages_S, answers["rewards"])
    _check_unchanged(answers, given)
    _expect_of(
        advantages_S.isfinite() | (answers["num_tokens"] == 0), "advantages must be finite", answers, advantages_S
    )
    return advantages_S.double()


def _expect_of(holds_S: torch.Tensor, told: str, answers: Results, advantages_S: torch.Tensor) -> None:
    if not holds_S.all():
        place = int((~holds_S).nonzero()[0])
        told = f"{told}: got {advantages_S[place]:.6g} for completion {place}"
        raise Violation(told, answers | {"advantages": advantages_S})


def random_answers(seed: int) -> Results:
    """Return `rewards`, `group_index` and `num_tokens` `[S]` of groups of 4, 1 and 3; one has no trained token."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens_S = torch.randint(1, 9, (8,), generator=generator)
    num_tokens_S[2] = 0
    groups_S = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2])
    return {"rewards": torch.rand(8, generator=generator), "group_index": groups_S, "num_tokens": num_tokens_S}


def check_advantage_form(advantage_fn: AdvantageFn, answers: Results) -> None:
    """An advantage function returns one number per completion, changes no input, and returns the same again."""
    first, again = (_advantages(advantage_fn, answers) for _ in range(2))
    _expect_of(_is_close(again, first), "advantages must be the same when called again", answers, again)


def check_advantage_order(advantage_fn: AdvantageFn, answers: Results, seed: int = 1) -> None:
    """Neither the order of completions nor the numbers of groups matter."""
    first_S, groups_S = _advantages(advantage_fn, answers), answers["group_index"]
    order_S = torch.randperm(len(first_S), generator=torch.Generator().manual_seed(seed))
    mixed = {name: value[order_S] for name, value in answers.items()}
    got_S = _advantages(advantage_fn, mixed)
    _expect_of(_is_close(got_S, first_S[order_S]), "advantages must be the same in another order", mixed, got_S)
    renamed = answers | {"group_index": groups_S.max() - groups_S}
    got_S = _advantages(advantage_fn, renamed)
    _expect_of(_is_close(got_S, first_S), "advantages must be the same with groups renumbered", renamed, got_S)


def check_advantage_finite(advantage_fn: AdvantageFn, answers: Results) -> None:
    """Groups whose rewards are all equal, or nearly, and negative or large rewards have finite advantages."""
    for rewards in ([0.0] * 8, [0.1] * 8, [0.35] * 7 + [0.95], [-1.0] * 8, [1e6, 1e6 + 1] * 4):
        _advantages(advantage_fn, answers | {"rewards": torch.tensor(rewards)})


def check_advantage_direction(advantage_fn: AdvantageFn, answers: Results) -> None:
    """In a group, among completions of the same length, a higher reward has no lower advantage."""
    same = answers | {"num_tokens": torch.full_like(answers["num_tokens"], 5)}
    advantages_S, groups_S = _advantages(advantage_fn, same), same["group_index"]
    is_above_SS = (groups_S[:, None] == groups_S) & (same["rewards"][:, None] > same["rewards"])
    is_wrong_SS = is_above_SS & (advantages_S[:, None] < advantages_S - _RTOL)
    try:
        _expect_of(~is_wrong_SS.any(dim=1), "a higher reward must have no lower advantage", same, advantages_S)
    except Violation as violation:
        raise Remark(str(violation), violation.columns) from None


def _is_close(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return torch.isclose(got, expected, rtol=_RTOL, atol=_RTOL, equal_nan=True)


LOSS_PROPERTIES: dict[str, Callable[[LossFn, TensorDict], None]] = {
    "one loss per token, statistics without gradient; inputs unchanged": check_form,
    "equal for any split into micro-batches and any order of rows": check_split,
    "what masked positions hold (nan, inf) plays no part": check_masked_values,
    "how many masked positions there are plays no part": check_masked_counts,
    "finite at log ratios of +-100, a rollout logprob of -inf, a probability of 1": check_finite,
    "autograd equals central differences": check_gradient,
    "at ratio 1 the gradient is -advantage": check_ratio_of_one,
}
ADVANTAGE_PROPERTIES: dict[str, Callable[[AdvantageFn, Results], None]] = {
    "one finite number per completion; inputs unchanged": check_advantage_form,
    "equal for any order of completions and numbers of groups": check_advantage_order,
    "finite where rewards are equal, nearly equal, negative, large": check_advantage_finite,
    "in a group a higher reward has no lower advantage": check_advantage_direction,
}
