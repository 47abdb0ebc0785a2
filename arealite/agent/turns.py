"""The turns of one run of an agent as a tree of token-id prefixes.

The parent of a turn is the turn whose tokens are a prefix of its prompt. A row is a path from a root to a leaf; a turn
on several paths is trained on in the first and is context in the others. Sub-agents are separate roots; a compaction,
an edit or a template that rewrites history starts a new root or branch. Invariant: each sampled token is trained on in
exactly one row, with the ids, logprobs and versions of the server.
"""

# b rows of one run, S tokens

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDict

from arealite.api.errors import AgentError
from arealite.api.io_struct import ModelResponse
from arealite.chat.template import Message, texts_of
from arealite.utils.tensors import concat_padded_tensors
from arealite.workflow.trajectory import SampledTurn, row_of_turns

Branch = Literal["template", "tools"]
"""Why a prompt does not continue the turn before it: the chat template rewrites history, or the tools have changed."""


@dataclass(eq=False)
class Turn:
    """One answer of the model: its prompt, its tokens, and the message for the client."""

    id: str
    """Id of the response, as clients see it."""
    parent: "Turn | None"
    response: ModelResponse
    prompt_text: str
    """Text of the prompt's ids."""
    raw_text: str
    """Sampled text without the end token, but with a stop string."""
    messages: list[Message]
    """The client's whole conversation, in canonical form."""
    message: Message
    """The message for the client, in canonical form."""
    is_trained: bool = True
    tools: list[Any] | None = None
    """Tools in the client's request."""
    branch: Branch | None = None

    @property
    def ids(self) -> list[int]:
        return self.response.input_tokens + self.response.output_tokens

    @property
    def text(self) -> str:
        return self.prompt_text + self.raw_text

    @property
    def conversation(self) -> list[Message]:
        """The messages and the answer."""
        return [*self.messages, self.message]

    @property
    def path(self) -> list["Turn"]:
        """The turns from the root to this turn."""
        path: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]


class Run:
    """The turns of one run of the agent. `counts` has the number of `malformed_calls`."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.counts: Counter[str] = Counter()
        self.continued: set[Turn] = set()  # turns that a later request has continued
        self.by_id: dict[str, Turn] = {}
        self._by_digest: dict[str, list[Turn]] = defaultdict(list)  # digests of conversations with their answers

    def add(self, turn: Turn) -> None:
        """Add a turn."""
        self.turns.append(turn)
        self.by_id[turn.id] = turn
        self._by_digest[list(digests(turn.conversation))[-1]].append(turn)

    def discard(self, id: str) -> None:
        """Remove the turn of an undelivered answer: it is neither trained on nor a parent.

        A turn that was continued was read, even if its client seemed to have left.
        """
        turn = self.by_id.get(id)
        if turn is not None and turn not in self.continued:
            turn.is_trained = False
            self.turns.remove(turn)
            del self.by_id[id]
            self._by_digest[list(digests(turn.conversation))[-1]].remove(turn)

    @property
    def branches(self) -> Counter[str]:
        """The number of turns that could not continue the turn before them, by reason."""
        return Counter(turn.branch for turn in self.turns if turn.branch is not None)

    def parent_of(self, messages: Sequence[Message]) -> Turn | None:
        """Return the turn that a conversation continues: its longest prefix, the newest among equals.

        Null equals "", the order of keys and call ids are ignored, and reasoning is compared only if it was sent.
        """
        for length, digest in reversed(list(enumerate(digests(messages), start=1))):
            equal = [turn for turn in self._by_digest.get(digest, ()) if _same_thoughts(turn, messages[length - 1])]
            if equal:
                ids = _call_ids(messages[length - 1])
                candidates = [turn for turn in equal if ids and _call_ids(turn.message) == ids] or equal
                return candidates[-1]
        return None

    def rows(
        self, reward: float, turn_rewards: Mapping[str, float], *, turn_discount: float = 1.0, sample_index: int = 0
    ) -> TensorDict:
        """Return the rows `[b, S]` of the run, each with the `reward` of the whole run.

        Summing `turn_rewards [b, S]` from a turn on gives the turn's return: its own reward (by id) plus
        `turn_discount` times the return of the next turn, averaged if several follow. Without rewards of turns the
        leaves earn `reward`. Turns that are not trained on and lead to no such turn are left out.
        Raises AgentError if no sampled token can be trained on.
        """
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
            raise AgentError(
                f"an agent must ask the model and get an answer to train on: got {len(self.turns)} turns, none of them "
                "trained. Let it ask with the api_key of its run, or return None to reject the run."
            )
        run = concat_padded_tensors(rows)
        run["sample_index"] = torch.full((len(rows),), sample_index)
        return run

    def _live(self) -> set[Turn]:
        """Return the turns that are trained on, and their ancestors."""
        live: set[Turn] = set()
        for turn in reversed(self.turns):  # parents precede their children
            if turn in live or (turn.is_trained and turn.response.output_len > 0):
                live |= {turn} if turn.parent is None else {turn, turn.parent}
        return live

    def _gains(
        self, live: set[Turn], reward: float, turn_rewards: Mapping[str, float], discount: float
    ) -> dict[Turn, float]:
        """Return the addend of each turn, so that sums along a path are discounted returns."""
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
    """Return whether a turn's conversation is a prefix of a conversation."""
    at = len(turn.messages)
    if len(messages) <= at or not _same_thoughts(turn, messages[at]):
        return False
    return list(digests(messages[: at + 1])) == list(digests(turn.conversation))


def digests(messages: Sequence[Message]) -> Iterator[str]:
    """Yield a digest of the conversation up to each message."""
    digest = ""
    for message in messages:
        digest = hashlib.blake2b(f"{digest}{_key(message)}".encode()).hexdigest()
        yield digest


def _key(message: Message) -> str:
    """Return the canonical identity of a message, without its reasoning."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    content = message.get("content")
    others = [part for part in content if "text" not in part] if isinstance(content, list) else []
    if calls:  # clients may write 1.0 as 1, and integers above 53 bits as floats
        calls = json.loads(json.dumps(calls, default=str), parse_int=float)
    return json.dumps([message["role"], "".join(texts_of(message)), others, calls], sort_keys=True, default=str)


def _same_thoughts(turn: Turn, message: Message) -> bool:
    sent = message.get("reasoning_content")
    return not sent or sent == turn.message.get("reasoning_content")


def _call_ids(message: Message) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or []]
