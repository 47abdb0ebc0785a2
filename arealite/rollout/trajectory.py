"""Trajectories: validated when an episode ends, joined into a batch, split over ranks.

Invariant: trajectories that passed `check_trajectory` and `Columns` can be written, joined and sent to other ranks.
They have finite numbers, a version for every sampled token, and no token older than the head version of their episode.
A batch and its split depend on the trajectories, not on timing.
"""

# B rows (samples), S padded tokens

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from arealite.api.errors import TrajectoryError
from arealite.api.io_struct import MAX_LOGPROB
from arealite.api.workflow_api import own_metrics, runs_of
from arealite.utils.images import KEYS
from arealite.utils.packed import Piece, head_of, layout_of, longest_row, pack
from arealite.utils.tensors import RAGGED, concat_padded_tensors, split_balanced

_PER_TOKEN = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions")
_ALWAYS_PER_TOKEN = (*_PER_TOKEN, "kept_counts", "turn_rewards")
_KEPT = {"kept_ids", "kept_counts"}
_NUM_IDS = 2**31  # larger ids overflow tokenizers
_RULES: dict[str, tuple[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]]] = {
    "input_ids": (f"be from 0 to {_NUM_IDS - 1}", lambda ids: (ids >= 0) & (ids < _NUM_IDS)),
    "attention_mask": ("be 0 or 1", lambda mask: mask == (mask != 0)),
    "loss_mask": ("be 0 or 1", lambda mask: mask == (mask != 0)),
    "rewards": ("be finite", np.isfinite),
    "turn_rewards": ("be finite", np.isfinite),
    "logprobs": ("be finite and at most 0", lambda logprobs: (logprobs > -np.inf) & (logprobs <= MAX_LOGPROB)),
}
_CONVERT = "Convert it in arun_episode."
_COPY_KEPT = "Copy ModelResponse.output_kept, as trajectory_from_response does."
_COPY_VERSIONS = "Copy ModelResponse.output_versions."


class Record(TensorDict):
    """What the account knows of a trajectory whose rows are elsewhere: the values of keys of `[b]`, others empty."""

    widths: dict[str, int]
    """Of the keys that have one."""
    num_tokens: int
    longest: int
    """Tokens of the longest row."""
    places: Sequence[Any]
    """Where the pieces of the rows are."""

    def without_rows(self) -> TensorDict:
        """Return what the trajectory is without its rows, with the widths of its keys."""
        of_key = {key: value[:0] for key, value in self.items()}
        wide = {key: of_key[key].new_zeros(0, width, *of_key[key].shape[2:]) for key, width in self.widths.items()}
        return TensorDict(of_key | wide, batch_size=[0])


class Columns:
    """Requires all trajectories of a workflow to have the keys, dtypes and dimensions of its first one."""

    def __init__(self) -> None:
        self._first: dict[int, dict[str, tuple[Any, ...]]] = {}  # by id of a live workflow

    def check(self, trajectory: TensorDict, workflow: object) -> None:
        columns = {key: (value.dtype, value.dim(), *value.shape[2:]) for key, value in trajectory.items()}
        if id(workflow) not in self._first:
            self._first[id(workflow)] = columns
            weakref.finalize(workflow, self._first.pop, id(workflow))
        if columns != (first := self._first[id(workflow)]):
            other = [key for key in sorted(columns.keys() | first.keys()) if columns.get(key) != first.get(key)]
            raise TrajectoryError(
                "a trajectory must have the keys, dtypes and dimensions of the first one of its workflow: got other "
                f"{', '.join(other)}. Return the same keys and types for every prompt."
            )


def has_spread(trajectory: TensorDict) -> bool:
    """Return whether the rewards of a group differ: the filter of dynamic sampling (DAPO, arXiv:2503.14476)."""
    return bool((trajectory["rewards"] != trajectory["rewards"][0]).any())


def check_trajectory(
    trajectory: object, head_version: int, newest_version: float = math.inf, *, needs_kept: bool = False
) -> TensorDict:
    """Return the trajectory with rewards and metrics in float32; raise TrajectoryError with the key that is wrong.

    `needs_kept` requires the kept set of each token, as top_p, top_k or min_p restricted a completion.
    """
    if not isinstance(trajectory, TensorDict):
        raise TrajectoryError(
            f"arun_episode must return a TensorDict or None: got {type(trajectory).__name__}. "
            "Return one row per sample, as RolloutWorkflow describes."
        )
    present = set(trajectory.keys())
    if missing := [key for key in (*_PER_TOKEN, "rewards") if key not in present]:
        raise TrajectoryError(
            f"a trajectory must have the keys {', '.join(_PER_TOKEN)} and rewards: got no {', '.join(missing)}. "
            "Add what is missing in arun_episode."
        )
    if (needs_kept or present & _KEPT) and not present >= _KEPT:
        raise TrajectoryError(
            "a trajectory sampled with top_p, top_k or min_p must have the keys kept_ids and kept_counts, else ratios "
            f"would be wrong: got no {', '.join(sorted(_KEPT - present))}. Use trajectory_from_response, a top_k, and "
            "servers that return what they sample from (lite, SGLang from 0.5.23 on)."
        )
    _check_shapes(trajectory)
    metrics = own_metrics(trajectory)
    arrays = {key: _array(trajectory, key) for key in (*_RULES, "versions", *metrics) if key in present}
    _check_numbers(arrays, metrics)
    if "sample_index" in present:
        _check_runs(trajectory)
    _check_images(trajectory)
    if present >= _KEPT:
        _check_kept(trajectory)
    _check_versions(arrays, head_version, newest_version)
    # A score may be the int 1 in one trajectory and 0.5 in another.
    others = {key: trajectory[key].float() for key in ("rewards", *metrics) if arrays[key].dtype != np.float32}
    return trajectory.copy().update(others) if others else trajectory


def _check_shapes(trajectory: TensorDict) -> None:
    for key, value in (tensors := dict(trajectory.items())).items():
        is_plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and value.is_cpu
        if not is_plain or value.dtype.is_complex or value.requires_grad:  # value.is_complex() releases the GIL
            raise _broken(key, "be a real CPU tensor without gradient", repr(value)[:200], _CONVERT)
    shape = tuple(tensors["input_ids"].shape)
    if len(shape) != 2 or 0 in shape:
        rule = "be [B, S] with at least one row and token"
        raise _broken("input_ids", rule, list(shape), "Return None to reject an episode.")
    for keys, wanted in ((_ALWAYS_PER_TOKEN, shape), (("rewards", "no_eos", "sample_index"), shape[:1])):
        for key in keys:
            if key in tensors and (got := tensors[key].shape) != wanted:
                raise _broken(key, f"have the shape {list(wanted)}", list(got), "Give every sample one row.")
    if tuple(trajectory.batch_size[:1]) != shape[:1]:
        raise TrajectoryError(
            f"a trajectory must have a batch_size that begins with {list(shape[:1])}: got "
            f"{list(trajectory.batch_size)}. Pass batch_size to TensorDict."
        )


def _check_numbers(arrays: Mapping[str, np.ndarray[Any, Any]], metrics: Iterable[str]) -> None:
    for key in ("input_ids", "versions"):
        if (dtype := arrays[key].dtype).kind not in "iu":
            raise _broken(key, "be integers", dtype, _CONVERT)
    for key, (rule, is_right) in _RULES.items():
        # A third of the time of right.all().
        if key in arrays and np.count_nonzero(right := is_right(arrays[key])) < right.size:
            raise _broken(key, rule, arrays[key][~right][0], "Reject the episode or fix what computes it.")
    for key in metrics:
        if not np.isfinite(arrays[key]).all():
            raise _broken(key, "be finite, as it is a metric", arrays[key], "Use a number that fits rows without one.")


def _check_runs(trajectory: TensorDict) -> None:
    """Require the rows of a run to share its reward."""
    if (samples_B := _array(trajectory, "sample_index")).dtype != np.int64:
        raise _broken("sample_index", "be int64", samples_B.dtype, _CONVERT)
    runs, rewards_B = runs_of(trajectory), _array(trajectory, "rewards")
    if (other_B := rewards_B != rewards_B[runs.first_rows.numpy()[runs.of_rows.numpy()]]).any():
        rule = f"be equal in the rows of one run (sample_index {samples_B[other_B][0]})"
        raise _broken("rewards", rule, rewards_B[other_B][0], "Give each row what the whole run earned.")


def _check_images(trajectory: TensorDict) -> None:
    """Require each row of `pixel_values` to hold the patches of all grids of `image_grid_thw` in order."""
    if not (found := [key for key in KEYS if key in trajectory]):
        return
    if len(found) < len(KEYS) or [trajectory[key].ndim for key in KEYS] != [3, 3]:
        raise TrajectoryError(
            "a trajectory with images must have pixel_values [B, P, D] and image_grid_thw [B, I, 3]: got "
            f"{', '.join(f'{key} {list(trajectory[key].shape)}' for key in found)}. Use VisionRLVRWorkflow."
        )
    patches = int(_array(trajectory, "image_grid_thw").prod(-1).sum(-1).max(initial=0))
    if patches > (got := trajectory["pixel_values"].shape[1]):
        raise _broken("pixel_values", f"have {patches} patches in its longest row", got, "Copy all of an image.")


def _check_kept(trajectory: TensorDict) -> None:
    """Require each row of `kept_ids` to hold `kept_counts` ids per token in order, including the token itself."""
    keys = ("kept_ids", "kept_counts", "input_ids", "attention_mask")
    ids_BL, counts_BS, tokens_BS, mask_BS = (_array(trajectory, key) for key in keys)
    for key, values in (("kept_ids", ids_BL), ("kept_counts", counts_BS)):
        if values.dtype.kind not in "iu" or values.ndim != 2 or values.min(initial=0) < 0:
            raise _broken(key, "be two-dimensional integers of at least 0", values.dtype, _COPY_KEPT)
    if (counts_BS[mask_BS == 0] > 0).any():
        raise _broken("kept_counts", "be 0 where attention_mask is 0", "a kept set in the padding", _COPY_KEPT)
    if (counts_BS[np.arange(len(mask_BS)), (mask_BS != 0).argmax(1)] > 0).any():
        raise _broken("kept_counts", "be 0 on first tokens, which nothing predicts", "a kept set there", _COPY_KEPT)
    if (sums_B := counts_BS.sum(1)).max() > ids_BL.shape[1]:
        raise _broken("kept_ids", f"have {sums_B.max()} ids in its longest row", ids_BL.shape[1], _COPY_KEPT)
    for ids, counts, tokens in zip(ids_BL, counts_BS, tokens_BS):
        owner = np.repeat(np.arange(len(tokens)), counts)
        num_found = np.bincount(owner[ids[: len(owner)] == tokens[owner]], minlength=len(tokens))
        if (lacking := (num_found != 1) & (counts > 0)).any():
            raise _broken("kept_ids", "have each token once among its own ids", tokens[lacking][0], _COPY_KEPT)


def _check_versions(arrays: Mapping[str, np.ndarray[Any, Any]], head_version: int, newest_version: float) -> None:
    is_sampled = arrays["loss_mask"] != 0
    if np.count_nonzero(is_sampled & (arrays["attention_mask"] == 0)):
        got, advice = "a sampled token in the padding", "Set attention_mask on every real token."
        raise _broken("loss_mask", "be 0 where attention_mask is 0", got, advice)
    versions = np.where(is_sampled, arrays["versions"], head_version)
    oldest, newest = versions.min(), versions.max()
    if newest > newest_version:
        raise _broken("versions", f"be at most {newest_version}, the newest that servers have", newest, _COPY_VERSIONS)
    if oldest < head_version:
        rule = f"be at least {head_version} on sampled tokens, the version that the episode began with"
        advice = "Update every server before calling set_version on the inference engine."
        raise _broken("versions", rule, oldest, _COPY_VERSIONS if oldest < 0 else advice)


def _broken(key: str, rule: str, got: object, advice: str) -> TrajectoryError:
    return TrajectoryError(f"trajectory[{key!r}] must {rule}: got {got}. {advice}")


def _array(trajectory: TensorDict, key: str) -> np.ndarray[Any, Any]:
    """Return a key as a numpy array. Unlike torch, numpy keeps the GIL, which a busy process returns slowly."""
    try:
        return trajectory[key].numpy()
    except (TypeError, RuntimeError) as error:
        raise _broken(key, "be of a type that numpy has", error, _CONVERT) from error


def assemble_batch(trajectories: Sequence[TensorDict]) -> TensorDict:
    """Join trajectories `[b, S]` in the given order to a batch `[B, S]`; `group_index [B]` numbers the episodes."""
    batch = concat_padded_tensors(trajectories)
    sizes = torch.tensor([one.batch_size[0] for one in trajectories])
    batch["group_index"] = torch.repeat_interleave(torch.arange(len(trajectories)), sizes)
    return batch


def split_batch(trajectories: Sequence[TensorDict], num_shares: int, num_minibatches: int = 1) -> Iterator[list[Piece]]:
    """Yield the pieces of each share, for `join`: those rows of the assembled batch, in order and without the padding
    that follows the longest."""
    layout = layout_of(trajectories).set("group_index", torch.zeros(0, dtype=torch.int64))
    lengths = [int(one["attention_mask"].sum()) for one in trajectories]
    for groups in deal_groups(lengths, list(map(has_spread, trajectories)), num_shares, num_minibatches):
        members = [_numbered(trajectories[group], group) for group in groups]
        yield [head_of(layout, map(longest_row, members)), *(pack(one, layout.keys(), layout) for one in members)]


def packed_alone(trajectory: TensorDict, keys: Iterable[str]) -> Piece:
    """Return keys of a trajectory, and its mask, as a piece that can be joined with any others.

    A key that may be one of tokens only by chance, as others show, keeps its padding.
    """
    layout = trajectory[:0]
    for key in layout.keys() & {*_ALWAYS_PER_TOKEN, *RAGGED}:
        layout[key] = layout[key][:, :0]
    return pack(trajectory, dict.fromkeys([*keys, "attention_mask"]), layout)


def _numbered(trajectory: TensorDict, group: int) -> TensorDict:
    """Return a copy with `group_index [b]`."""
    return trajectory.copy().set("group_index", torch.full(trajectory.batch_size[:1], group))


def deal_groups(
    lengths: Sequence[int], have_spread: Sequence[bool], num_shares: int, num_minibatches: int = 1
) -> list[list[int]]:
    """Assign whole groups of these numbers of tokens to shares, in order; a share may be empty.

    Shares have about equal tokens in each minibatch, as ranks wait for each other in every optimizer step; a group is
    in minibatch `group_index % num_minibatches`, as in the actor. Tokens of groups with and without spread are balanced
    separately, as a step may skip the latter.
    """
    num_minibatches = min(num_minibatches, len(lengths))
    loads = [0] * num_shares
    shares: list[list[int]] = [[] for _ in loads]
    for first, is_live in itertools.product(range(num_minibatches), (True, False)):
        members = [group for group in range(first, len(lengths), num_minibatches) if have_spread[group] == is_live]
        parts = [[members[i] for i in part] for part in split_balanced([lengths[g] for g in members], num_shares)]
        # the largest part to the share with the fewest tokens
        parts.sort(key=lambda groups: -sum(lengths[g] for g in groups))
        for share, groups in zip(sorted(range(num_shares), key=lambda share: loads[share]), parts):
            loads[share] += sum(lengths[g] for g in groups)
            shares[share] += groups
    return [sorted(groups) for groups in shares]
