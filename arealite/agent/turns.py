"""The turns of one run of an agent, as the tree that their token ids make.

A turn's parent is the turn whose tokens its prompt begins with. A row is a path from a root to a leaf; a turn that lies
on several paths is trained on in the first of them, and is context in the others. Sub-agents are roots of their own; a
compaction, an edit or a template that rewrites history is a new root, or a branch. Invariant: each sampled token is
trained on in exactly one row, with the ids, logprobs and versions that the server returned.
"""

# b rows of one run, S tokens

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from arealite.api.errors import TrajectoryError
from arealite.api.io_struct import ModelResponse
from arealite.chat.text import Message, texts_of
from arealite.utils.tensors import concat_padded_tensors
from arealite.workflow.trajectory import SampledTurn, row_of_turns


@dataclass(eq=False)
class Turn:
    """One answer of the model: what was asked, what was sampled, and what the client was given."""

    id: str
    """Of the response, as clients see it."""
    parent: "Turn | None"
    response: ModelResponse
    prompt_text: str
    """What the prompt's ids stand for."""
    raw_text: str
    """What was sampled, as text, without the token that ended it. A stop string is still there."""
    messages: list[Message]
    """What the client had sent, canonical: the whole conversation."""
    message: Message
    """What the client was given, canonical."""
    is_trained: bool = True
    tools: list[Any] | None = None
    """What the client had sent beside the messages."""

    @property
    def ids(self) -> list[int]:
        return self.response.input_tokens + self.response.output_tokens

    @property
    def text(self) -> str:
        return self.prompt_text + self.raw_text

    @property
    def conversation(self) -> list[Message]:
        """The messages and the answer: what the next messages follow."""
        return [*self.messages, self.message]

    @property
    def path(self) -> list["Turn"]:
        """The turns from the root to this one."""
        path: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]


class Run:
    """The turns of one call of the agent.

    `branches` counts prompts that could not go on from the turn before them, by reason: `edited` (the agent changed or
    dropped messages), `template` (the chat template rewrites history), `tools` (their list changed). `counts` has what
    the bridge noticed: `malformed_calls`, `special_text`, `ambiguous_parents`.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.branches: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.continued: set[Turn] = set()  # turns that someone has gone on from, whatever became of that
        self._by_id: dict[str, Turn] = {}
        self._by_digest: dict[str, list[Turn]] = defaultdict(list)  # of conversations, the answer included
        self._asked: set[str] = set()  # digests of what was asked
        self._openings: set[str] = set()  # digests of conversations up to their first question

    def add(self, turn: Turn) -> None:
        """Record a turn that was delivered, or will be."""
        self.turns.append(turn)
        self._by_id[turn.id] = turn
        *asked, whole = digests(turn.conversation)
        self._by_digest[whole].append(turn)
        self._asked.add(asked[-1])
        self._openings |= {asked[index] for index in _first_question(turn.messages)}

    def discard(self, answer_id: str) -> None:
        """Remove the turns of an answer that no client got: they are never trained on, and no parents.

        One that was continued has been read, even if its client seemed to have left.
        """
        turns = [turn for turn in self.turns if turn.id.partition(".")[0] == answer_id]
        for turn in [] if self.continued.intersection(turns) else turns:
            turn.is_trained = False
            self.turns.remove(turn)
            del self._by_id[turn.id]
            self._by_digest[list(digests(turn.conversation))[-1]].remove(turn)

    def by_id(self, id: str) -> Turn | None:
        return self._by_id.get(id)

    def parent_of(self, messages: Sequence[Message]) -> Turn | None:
        """Return the turn that a conversation continues: the longest that it begins with; of equal ones the newest.

        Null and "" are one, the order of keys and the ids of calls don't count, and thoughts only if they were sent.
        """
        for length, digest in reversed(list(enumerate(digests(messages), start=1))):
            found = [turn for turn in self._by_digest.get(digest, ()) if _same_thoughts(turn, messages[length - 1])]
            if found:
                ids = _call_ids(messages[length - 1])
                named = [turn for turn in found if ids and _call_ids(turn.message) == ids]
                self.counts["ambiguous_parents"] += len(named or found) > 1
                return (named or found)[-1]
        return None

    def is_known(self, messages: Sequence[Message]) -> bool:
        """Whether exactly this was asked before: another sample of the same turn."""
        return list(digests(messages))[-1] in self._asked

    def is_edited(self, messages: Sequence[Message], parent: Turn | None) -> bool:
        """Whether messages after the parent's hold answers of this run, or begin as one of its conversations does."""
        num_known = len(parent.conversation) if parent else 0
        answers = {_key(turn.message) for turn in self.turns}
        if any(message["role"] == "assistant" and _key(message) in answers for message in messages[num_known:]):
            return True
        whole = list(digests(messages))
        return parent is None and any(whole[index] in self._openings for index in _first_question(messages))

    def rows(
        self, reward: float, turn_rewards: Mapping[str, float], *, turn_discount: float = 1.0, sample_index: int = 0
    ) -> TensorDict:
        """Return the rows `[b, S]` of the run, each with the run's `reward` as a whole.

        Sums of `turn_rewards [b, S]` from a turn on are that turn's return: what the turn earned (by its id) and
        `turn_discount` of the return of the next, on average if several follow; without rewards of turns, the leaves
        earn `reward`. Turns that neither are trained on nor lead to such a turn count for nothing.
        Raises TrajectoryError if nothing was sampled to train on, or for the id of no turn.
        """
        if unknown := turn_rewards.keys() - self._by_id.keys():
            raise TrajectoryError(
                f"rewards of turns must name responses of their run: got {sorted(unknown)}. Use the response's id."
            )
        live = self._live()
        leaves = sorted(live - {turn.parent for turn in live}, key=lambda turn: turn.ids)
        trained: set[Turn] = set()
        rows: list[TensorDict] = []
        gains = self._gains(live, reward, turn_rewards, turn_discount)
        for path in (leaf.path for leaf in leaves):
            turns: list[SampledTurn] = []
            for turn in path:
                gain = gains[turn] if turn.response.output_len else None
                turns.append(SampledTurn(turn.response, gain, turn.is_trained and turn not in trained))
            rows.append(row_of_turns(turns, reward, has_turn_rewards=True))
            trained.update(path)
        if not rows:
            raise TrajectoryError(
                f"a run must sample something to train on: got {len(self.turns)} turns, none of them trained. Let the "
                "agent call the model with the key of its run, or return None to reject the run."
            )
        run = concat_padded_tensors(rows)
        run["sample_index"] = torch.full((len(rows),), sample_index)
        return run

    def _live(self) -> set[Turn]:
        """Return the turns that are trained on, and those that they continue."""
        live: set[Turn] = set()
        for turn in reversed(self.turns):  # children come after their parents
            if turn in live or (turn.is_trained and turn.response.output_len > 0):
                live |= {turn} if turn.parent is None else {turn, turn.parent}
        return live

    def _gains(
        self, live: set[Turn], reward: float, turn_rewards: Mapping[str, float], discount: float
    ) -> dict[Turn, float]:
        """Return what each turn adds to the sum, so that sums along a path are discounted returns."""
        children: dict[Turn | None, list[Turn]] = defaultdict(list)
        turns = [turn for turn in self.turns if turn in live]
        for turn in turns:
            children[turn.parent].append(turn)
        returns: dict[Turn, float] = {}
        gains: dict[Turn, float] = {}
        for turn in reversed(turns):
            after = [returns[child] for child in children[turn]]
            later = sum(after) / len(after) if after else 0.0
            own = turn_rewards.get(turn.id, 0.0) if turn_rewards else (0.0 if after else reward)
            returns[turn] = own + discount * later
            gains[turn] = returns[turn] - later
        return gains


def continues(turn: Turn, messages: Sequence[Message]) -> bool:
    """Whether a conversation begins with a turn's."""
    at = len(turn.messages)
    if len(messages) <= at or not _same_thoughts(turn, messages[at]):
        return False
    return list(digests(messages[: at + 1])) == list(digests(turn.conversation))


def digests(messages: Sequence[Message]) -> Iterator[str]:
    """Yield, for each message, what names the conversation up to it."""
    digest = ""
    for message in messages:
        digest = hashlib.blake2b(f"{digest}{_key(message)}".encode()).hexdigest()
        yield digest


def _key(message: Message) -> str:
    """What of a message must be the same to count as that message; thoughts are compared apart."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    content = message.get("content")
    others = [part for part in content if "text" not in part] if isinstance(content, list) else []
    if calls:  # clients write 1.0 as 1, and integers of more than 53 bits as floats
        calls = json.loads(json.dumps(calls, default=str), parse_int=float)
    return json.dumps([message["role"], "".join(texts_of(message)), others, calls], sort_keys=True, default=str)


def _first_question(messages: Sequence[Message]) -> Iterator[int]:
    """Yield the index of the first message that is not the system's, if there is one."""
    yield from [index for index, message in enumerate(messages) if message["role"] not in ("system", "developer")][:1]


def _same_thoughts(turn: Turn, message: Message) -> bool:
    sent = message.get("reasoning_content")
    return not sent or sent == turn.message.get("reasoning_content")


def _call_ids(message: Message) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or []]
