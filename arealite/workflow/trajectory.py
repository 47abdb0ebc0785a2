"""Builds training rows from completions, so that no workflow writes masks, logprobs or versions by hand.

A *run* is one sample of a prompt's group, with one reward. It has a single row as long as each prompt begins with the
tokens before it; a compaction or a sub-agent begins another row. Invariant: each sampled token is trained on in exactly
one row, and is context in the others.
"""

# b rows of one run, S tokens

import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from arealite.api.errors import TrajectoryError
from arealite.api.io_struct import ModelResponse
from arealite.utils.background import gathered
from arealite.utils.tensors import concat_padded_tensors


async def sample_group(run: Callable[[int], Coroutine[Any, Any, TensorDict]], num_samples: int) -> TensorDict:
    """Await `run(sample)` for all samples of a prompt at once and join their rows; the first error cancels the rest."""
    return concat_padded_tensors(await gathered(run(sample) for sample in range(num_samples)))


@dataclass
class SampledTurn:
    """A completion in one row."""

    response: ModelResponse
    reward: float | None = None
    """The turn's own reward."""
    is_trained: bool = True
    """False for context."""

    @property
    def ids(self) -> list[int]:
        return self.response.input_tokens + self.response.output_tokens


def trajectory_from_response(response: ModelResponse, reward: float) -> TensorDict:
    """Return one completion as a trajectory with a single row: tensors `[1, S]`, rewards and no_eos `[1]`."""
    return trajectory_from_turns([response], reward)


def trajectory_from_turns(turns: Sequence[ModelResponse], reward: float) -> TensorDict:
    """Return a conversation as a trajectory with a single row, in which only sampled tokens are trained on.

    Raises TrajectoryError if a turn does not begin with the tokens before it.
    """
    return row_of_turns([SampledTurn(response) for response in turns], reward)


def row_of_turns(turns: Sequence[SampledTurn], reward: float, *, has_turn_rewards: bool = False) -> TensorDict:
    """Return turns as a trajectory with a single row.

    `turn_rewards [1, S]` has the reward of each turn, also of context, on its last token. Raises TrajectoryError if a
    turn does not begin with the tokens before it, or has a reward and no token.
    """
    ids: list[int] = []
    loss_mask: list[np.ndarray[Any, Any]] = []  # of one sort of tokens each
    logprobs: list[float] = []
    versions: list[int] = []
    kept: list[list[int]] = []
    rewards: list[float] = []
    for number, turn in enumerate(turns, start=1):
        response, trains = turn.response, turn.is_trained
        if response.input_tokens[: len(ids)] != ids:
            raise TrajectoryError(
                "the prompt of a turn must begin with the tokens of the turns before it: got others in turn "
                f"{number}. Make it with arealite.chat.template.next_prompt."
            )
        if turn.reward is not None and response.output_len == 0:
            raise TrajectoryError(
                f"a turn with a reward must have sampled a token: got none in turn {number}. Add the reward to the "
                "turn before it."
            )
        num_sampled = response.output_len if trains else 0
        before, ids = len(ids), turn.ids
        num_given = len(ids) - before - num_sampled
        loss_mask += [np.zeros(num_given, np.int64), np.ones(num_sampled, np.int64)]
        logprobs += [0.0] * num_given + (response.output_logprobs if trains else [])
        versions += [-1] * num_given + (response.output_versions if trains else [])
        kept += [[]] * num_given + ((response.output_kept or [[]] * num_sampled) if trains else [])
        rewards += [0.0] * (len(ids) - len(rewards))
        if turn.reward is not None:
            rewards[-1] = turn.reward
    trained = [turn.response for turn in turns if turn.is_trained]
    trajectory = {
        "input_ids": _tensor([ids], np.int64),
        "attention_mask": torch.from_numpy(np.ones((1, len(ids)), np.bool_)),
        "loss_mask": torch.from_numpy(np.concatenate(loss_mask)[None]),
        "logprobs": _tensor([logprobs], np.float32),
        "versions": _tensor([versions], np.int64),
        "rewards": _tensor([reward], np.float32),
        "no_eos": _tensor([(trained or [response])[-1].stop_reason == "length"], np.bool_),
    }
    if has_turn_rewards:
        trajectory["turn_rewards"] = _tensor([rewards], np.float32)
    if all(response.output_kept is not None for response in trained):
        trajectory["kept_counts"] = _tensor([list(map(len, kept))], np.int32)
        trajectory["kept_ids"] = _tensor([list(itertools.chain(*kept))], np.int32)
    return TensorDict(trajectory, batch_size=[1])


class TrajectoryBuilder:
    """Collects the given and sampled tokens of one run, and makes its rows.

    `builder.ids` is the next prompt:

        builder = TrajectoryBuilder(prompt_ids)
        builder.add(await engine.agenerate(ModelRequest(builder.ids, gconfig)))
        builder.extend(feedback_ids)
        builder.add(await engine.agenerate(ModelRequest(builder.ids, gconfig)))
        return builder.finish(reward)
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._ids = list(prompt_ids)
        self._turns: list[SampledTurn] = []  # of the row that grows
        self._rows: list[list[SampledTurn]] = []  # rows that have ended

    @property
    def ids(self) -> list[int]:
        """The tokens of the row so far."""
        return list(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Append given tokens, such as an environment's reply: context, never trained on."""
        self._ids += ids

    def add(self, response: ModelResponse, reward: float | None = None) -> None:
        """Append the completion of `ids`, with the turn's own reward."""
        if response.input_tokens != self._ids:
            raise TrajectoryError(
                f"a response must be to the {len(self._ids)} tokens of builder.ids: got one to {response.input_len} "
                f"tokens, the same up to token {_num_common(response.input_tokens, self._ids)}. Generate with "
                "ModelRequest(builder.ids, ...), or begin another row with builder.branch(ids)."
            )
        self._turns.append(SampledTurn(response, reward))
        self._ids = response.input_tokens + response.output_tokens

    def earn(self, reward: float) -> None:
        """Add to the reward of the row's last turn."""
        if not (self._turns and self._turns[-1].is_trained):
            raise TrajectoryError(
                f"a reward must follow a turn of its row: got {reward} and none. Call earn() before branch()."
            )
        self._turns[-1].reward = (self._turns[-1].reward or 0.0) + reward

    def branch(self, ids: Sequence[int] | None = None) -> None:
        """End the row, and begin another with the context `ids` (None: the tokens so far). Turns that are a prefix of
        `ids` keep their rewards, and are not trained on again."""
        self._rows.append(self._turns)
        self._ids = self.ids if ids is None else list(ids)
        turns = [replace(turn, is_trained=False) for turn in self._turns]
        self._turns = [turn for turn in turns if self._ids[: len(turn.ids)] == turn.ids]

    def finish(self, reward: float | None = None, *, sample_index: int = 0) -> TensorDict:
        """Return the rows `[b, S]` of the run, each with its `reward` as a whole (None: the sum of what turns earned).

        `sample_index [b]` says which run of the group it is. `turn_rewards [b, S]` is there if any turn has a reward:
        what each turn earned, with the rest of the run's reward on the last turn of the row.
        """
        rows = [row for row in (*self._rows, self._turns) if any(turn.is_trained for turn in row)]
        trained = [turn for row in rows for turn in row if turn.is_trained]
        gains = [turn.reward for turn in trained if turn.reward is not None]
        if not trained or (reward is None and not gains):
            raise TrajectoryError(
                f"a run must have a response and a reward: got {len(trained)} responses, reward {reward} and "
                f"{len(gains)} rewards of turns. Add what was sampled, or return None to reject the episode."
            )
        total = sum(gains) if reward is None else reward
        run = concat_padded_tensors([_row(row, total, has_turn_rewards=bool(gains)) for row in rows])
        run["sample_index"] = torch.full((len(rows),), sample_index)
        return run


def _row(turns: Sequence[SampledTurn], reward: float, *, has_turn_rewards: bool) -> TensorDict:
    rest, last = reward - sum(turn.reward or 0.0 for turn in turns), turns[-1]
    if has_turn_rewards and rest:
        turns = [*turns[:-1], replace(last, reward=(last.reward or 0.0) + rest)]
    return row_of_turns(turns, reward, has_turn_rewards=has_turn_rewards)


def _num_common(ids_a: Sequence[int], ids_b: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids_a, ids_b)))


def _tensor(values: list[Any], dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype))  # numpy reads lists faster than torch
