"""What an episode returns: checked when it arrives, joined into a batch, split over ranks.

Invariant: a trajectory that passed `check_trajectory` has finite numbers, a version for every sampled token, and no
token older than the version its episode began with. A batch and its split depend on the trajectories, not on timing.
"""

# B rows (samples), S padded tokens

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from arealite.api.errors import TrajectoryError
from arealite.utils.micro_batch import split_balanced
from arealite.utils.tensors import concat_padded_tensors

_PER_TOKEN = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions")


def check_trajectory(trajectory: object, head_version: int) -> TensorDict:
    """Return the trajectory, or raise TrajectoryError with the key that breaks the contract."""
    if not isinstance(trajectory, TensorDict):
        raise TrajectoryError(
            f"arun_episode must return a TensorDict or None: got {type(trajectory).__name__}. "
            "Return one row per sample, as RolloutWorkflow describes."
        )
    present = set(trajectory.keys())
    missing = [key for key in (*_PER_TOKEN, "rewards") if key not in present]
    if missing:
        raise TrajectoryError(
            f"a trajectory must have the keys {', '.join(_PER_TOKEN)} and rewards: got no {', '.join(missing)}. "
            "Add what is missing in arun_episode."
        )
    _check_shapes(trajectory)
    _check_numbers(trajectory, head_version)
    return trajectory


def _check_shapes(trajectory: TensorDict) -> None:
    shape = tuple(trajectory["input_ids"].shape)
    if len(shape) != 2 or 0 in shape:
        rule = "be [B, S] with at least one row and token"
        raise _broken("input_ids", rule, list(shape), "Return None to reject an episode.")
    expected = dict.fromkeys(_PER_TOKEN, shape) | dict.fromkeys(("rewards", "no_eos"), shape[:1])
    for key, wanted in expected.items():
        if key in trajectory and (got := tuple(trajectory[key].shape)) != wanted:
            raise _broken(key, f"have the shape {list(wanted)}", list(got), "Give every sample one row.")


def _check_numbers(trajectory: TensorDict, head_version: int) -> None:
    for key in ("rewards", "logprobs"):
        values = _array(trajectory, key)
        if not np.isfinite(values).all():
            bad = values[~np.isfinite(values)][0]
            raise _broken(key, "be finite", bad, "Reject the episode or fix what computes it.")
    is_sampled = _array(trajectory, "loss_mask") != 0
    if (is_sampled & (_array(trajectory, "attention_mask") == 0)).any():
        got, advice = "a sampled token in the padding", "Set attention_mask on every real token."
        raise _broken("loss_mask", "be 0 where attention_mask is 0", got, advice)
    oldest = np.where(is_sampled, _array(trajectory, "versions"), head_version).min()
    if oldest < head_version:
        rule = f"be at least {head_version} on sampled tokens, the version that the episode began with"
        advice = "Update every server before calling set_version on the inference engine."
        raise _broken("versions", rule, oldest, "Copy ModelResponse.output_versions." if oldest < 0 else advice)


def _broken(key: str, rule: str, got: object, advice: str) -> TrajectoryError:
    return TrajectoryError(f"trajectory[{key!r}] must {rule}: got {got}. {advice}")


def _array(trajectory: TensorDict, key: str) -> np.ndarray[Any, Any]:
    """Return a key as a numpy array: unlike torch, numpy keeps the GIL, which a busy process is slow to give back."""
    try:
        return trajectory[key].numpy()
    except (TypeError, RuntimeError) as error:
        rule = "be a CPU tensor without gradient, of a type that numpy has"
        raise _broken(key, rule, error, "Convert it in arun_episode.") from error


def assemble_batch(trajectories: Sequence[TensorDict]) -> TensorDict:
    """Join trajectories `[b, S]` in the given order to a batch `[B, S]`; `group_index [B]` numbers the episodes."""
    batch = concat_padded_tensors(trajectories)
    sizes = torch.tensor([one.batch_size[0] for one in trajectories])
    batch["group_index"] = torch.repeat_interleave(torch.arange(len(trajectories)), sizes)
    return batch


def split_batch(batch: TensorDict, num_shares: int) -> list[TensorDict]:
    """Split a batch into shares of about equal tokens, keeping groups whole and in order; a share may be empty."""
    if num_shares == 1:
        return [batch]
    group_index: torch.Tensor = batch["group_index"]
    tokens = torch.zeros(int(group_index.max()) + 1, dtype=torch.int64)
    tokens.index_add_(0, group_index, batch["attention_mask"].sum(1))
    shares = split_balanced(tokens.tolist(), num_shares)
    return [batch[torch.isin(group_index, torch.tensor(groups, dtype=torch.int64))] for groups in shares]
