"""Assigns sequences to the slots of the KV cache, and records which tokens each slot holds, so that a new sequence
computes only what no slot holds yet. Pure bookkeeping, no tensors.

Running sequences occupy slots 0..n-1. The slots behind them keep what ended sequences left (the turns of a conversation
so far) until a running sequence needs the slot; the least recently used goes first. One more slot, `spare`, holds a
long prompt that is prefilled in chunks.

Invariants: `running[i]` occupies slot i; slot s holds the keys and values of `tokens_SC[s, :lengths_S[s]]`, computed by
the current weights."""

# S slots, C context, L tokens of the prompt, R slots that share a prefix with it

from collections import deque
from collections.abc import Callable, Iterable, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from arealite.generation.request import FinishReason, GenerationRequest, GenerationResult, VersionSpan
from arealite.utils.images import Images
from arealite.utils.token_ids import StopStrings

MIN_PREFIX_TOKENS = 16
"""Shorter prefixes cost more to find and copy than to compute."""

Tokens = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Sequence:
    """A request with its output so far."""

    request: GenerationRequest
    stop_ids: frozenset[int]
    max_length: int  # limit on `length`
    stops: StopStrings | None
    future: Future[GenerationResult] = field(default_factory=Future)
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)  # ids that each output token was sampled from, if requested
    spans: list[VersionSpan] = field(default_factory=list)
    length: int = 0  # tokens of prompt and output so far
    has_stale_kv: bool = False  # whether older weights than the current ones computed its cache
    num_stale_tokens: int = 0  # output tokens sampled on such a cache

    @property
    def tokens(self) -> Tokens:
        return (*self.request.input_ids, *self.output_ids)

    @property
    def reusable_tokens(self) -> Tokens:
        """The tokens whose keys and values a later sequence may use: none if images or older weights computed them."""
        is_reusable = self.request.images is None and not self.has_stale_kv
        return self.tokens[: self.length - 1] if is_reusable else ()

    def append(self, token: int, logprob: float, version: str) -> FinishReason | None:
        """Add a sampled token; return why the sequence ends here, if it does."""
        if not self.spans or self.spans[-1].version != version:
            self.spans.append(VersionSpan(version, len(self.output_ids), len(self.output_ids)))
        self.num_stale_tokens += self.has_stale_kv
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        self.spans[-1].end += 1
        self.length += 1
        if token in self.stop_ids:
            return FinishReason("stop", token)
        if self.stops is not None and len(self.output_ids) >= self.request.params.min_new_tokens:
            matched = self.stops.matched(self.output_ids)
            if matched is not None:
                return FinishReason("stop", matched)
        return FinishReason("length") if self.length >= self.max_length else None


@dataclass(frozen=True)
class Prefill:
    """Sequences with equal tokens and images (a group's samples): the first slot, which holds `start` tokens, is
    computed, the others are copies. Without sequences: a chunk of a long prompt, in the spare slot."""

    tokens: Tokens
    start: int
    sequences: list[Sequence]
    first_slot: int

    @property
    def slots(self) -> range:
        return range(self.first_slot, self.first_slot + max(len(self.sequences), 1))


class Cache(Protocol):
    """The keys and values themselves."""

    def copy(self, source: int, destinations: Iterable[int], length: int) -> None:
        """Copy the first `length` tokens of a slot into other slots."""

    def swap(self, slot_a: int, slot_b: int, length: int) -> None:
        """Exchange the first `length` tokens of two slots."""


class SlotTable:
    """The contents of `slots` slots and the spare one."""

    def __init__(self, cache: Cache, *, slots: int, context: int, reuses: bool = True) -> None:
        """With `reuses` False no slot counts as holding anything, so every prompt is computed whole."""
        self.spare, self.reuses, self._cache = slots, reuses, cache
        self._tokens_SC = np.zeros((slots + 1, context), dtype=np.int32)  # mapped when first touched
        self._lengths_S = np.zeros(slots + 1, dtype=np.int64)
        self._used_S = np.zeros(slots + 1, dtype=np.int64)  # time of the last use, in uses of the table; 0 if empty
        self._num_uses = 0
        self._num_touched = 0  # slots that ever ran a sequence; others keep nothing, so that they cost no memory

    def find(self, tokens: Tokens) -> tuple[int, int]:
        """Return a slot with the longest prefix of `tokens`, and its length. The last token is never part of it, as its
        logits must be computed."""
        length, rows = len(tokens) - 1, (self._lengths_S >= MIN_PREFIX_TOKENS).nonzero()[0]
        if length < MIN_PREFIX_TOKENS or not len(rows):
            return 0, 0
        wanted_L = np.array(tokens[:length], dtype=np.int32)
        rows = rows[(self._tokens_SC[rows, :MIN_PREFIX_TOKENS] == wanted_L[:MIN_PREFIX_TOKENS]).all(1)]
        if not len(rows):
            return 0, 0
        differs_RL = self._tokens_SC[rows, :length] != wanted_L
        first_R = np.where(differs_RL.any(1), differs_RL.argmax(1), length)
        shared_R = np.minimum(first_R, self._lengths_S[rows])
        best = int(shared_R.argmax())
        self._touch(int(rows[best]))
        return int(rows[best]), int(shared_R[best])

    def claim(self, slot: int, tokens: Tokens) -> int:
        """Give the first free slot, or the spare one, to a sequence; return how many of its tokens the slot holds.

        A slot whose whole contents the sequence continues is taken over; from other slots the prefix is copied."""
        source, length = self.find(tokens)
        if length and source >= slot and length == self._lengths_S[source]:
            self._swap(slot, source)
        else:
            self.displace(slot)
            if length and source != slot:
                self._cache.copy(source, [slot], length)
            self.hold(slot, tokens[:length])
        return length

    def displace(self, slot: int) -> None:
        """Empty a slot; its contents replace the least recently used ones behind it, if those are older."""
        length, behind = int(self._lengths_S[slot]), self._used_S[slot + 1 : self._num_touched][::-1]
        if length and len(behind) and behind.min() < self._used_S[slot]:
            victim = self._num_touched - 1 - int(behind.argmin())
            self._cache.copy(slot, [victim], length)
            self._set(victim, self._tokens_SC[slot, :length], int(self._used_S[slot]))
        self._set(slot, (), 0)

    def hold(self, slot: int, tokens: Tokens) -> None:
        """Record that a slot holds the keys and values of these tokens."""
        self._set(slot, tokens if self.reuses else (), 0)
        self._touch(slot)
        if slot != self.spare:
            self._num_touched = max(self._num_touched, slot + 1)

    def release(self, slot: int, last: int, tokens: Tokens, last_length: int) -> None:
        """End the sequence of a slot, which held `tokens`; the sequence in slot `last`, with `last_length` cached
        tokens, moves into the gap."""
        keeps = self.reuses and len(tokens) >= MIN_PREFIX_TOKENS
        if slot != last and keeps:
            self._swap(slot, last, max(len(tokens), last_length))
        elif slot != last:
            self._cache.copy(last, [slot], last_length)
            self._set(slot, self._tokens_SC[last, : self._lengths_S[last]], int(self._used_S[last]))
        self.hold(last, tokens if keeps else ())

    def clear(self) -> None:
        """Forget all contents, which new weights would compute differently."""
        self._lengths_S[:] = self._used_S[:] = 0

    def _touch(self, slot: int) -> None:
        self._num_uses += 1
        self._used_S[slot] = self._num_uses if self._lengths_S[slot] else 0

    def _set(self, slot: int, tokens: Tokens | NDArray[np.int32], used: int) -> None:
        self._tokens_SC[slot, : len(tokens)] = tokens
        self._lengths_S[slot], self._used_S[slot] = len(tokens), used

    def _swap(self, slot_a: int, slot_b: int, length: int = 0) -> None:
        """Exchange at least `length` tokens of two slots, and all that the table has of them."""
        if slot_a == slot_b:
            return
        pair, reverse = [slot_a, slot_b], [slot_b, slot_a]
        known = int(self._lengths_S[pair].max())
        self._cache.swap(slot_a, slot_b, max(length, known))
        self._tokens_SC[pair, :known] = self._tokens_SC[reverse, :known]
        self._lengths_S[pair], self._used_S[pair] = self._lengths_S[reverse], self._used_S[reverse]


class Scheduler:
    """First come, first served, into `slots` slots."""

    def __init__(self, table: SlotTable, *, slots: int, max_prefill_tokens: int) -> None:
        """`max_prefill_tokens` bounds one pass: a longer prompt takes several, if the table can hold a part of it."""
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._table, self._slots, self._max_prefill_tokens = table, slots, max_prefill_tokens
        self._is_admitting = False

    def admit(self) -> list[Prefill]:
        """Give free slots to the sequences that wait longest; return what must be prefilled before they decode."""
        free = self._slots - len(self.running)
        # Prefilling one sequence costs a small model as much as decoding all, 14 to 25 % of throughput at random
        # lengths: while others run and more wait than fit, wait until an eighth of the slots is free, then fill all.
        may_wait = self.running and not self._is_admitting
        if not free or (may_wait and free < min(len(self.waiting), self._slots // 8)):
            self._is_admitting = False
            return []
        groups: dict[tuple[Tokens, Images | None], list[Sequence]] = {}
        num_tokens = 0
        while self.waiting and free:
            tokens, images = prompt = self.waiting[0].tokens, self.waiting[0].request.images
            if prompt not in groups:
                num_new = len(tokens) - (self._table.find(tokens)[1] if images is None else 0)
                num_tokens += num_new
                if groups and num_tokens > self._max_prefill_tokens:
                    break
                if images is None and self._table.reuses and num_new > self._max_prefill_tokens:
                    return [self._chunk(tokens)]
            groups.setdefault(prompt, []).append(self.waiting.popleft())
            free -= 1
        self._is_admitting = bool(self.waiting and free)
        return [self._place(tokens, images, sequences) for (tokens, images), sequences in groups.items()]

    def _chunk(self, tokens: Tokens) -> Prefill:
        """Compute the next tokens of a prompt that stays in the queue, where the next call meets it again."""
        start = self._table.claim(self._table.spare, tokens)
        return Prefill(tokens[: start + self._max_prefill_tokens], start, [], self._table.spare)

    def _place(self, tokens: Tokens, images: Images | None, sequences: list[Sequence]) -> Prefill:
        """Give the next slots to sequences with equal prompts."""
        first = len(self.running)
        start = self._table.claim(first, tokens if images is None else ())
        for slot in range(first + 1, first + len(sequences)):
            self._table.displace(slot)
        self.running.extend(sequences)
        return Prefill(tokens, start, sequences, first)

    def prefilled(self, prefill: Prefill) -> None:
        """Record that the slots hold the prompt now."""
        has_images = any(sequence.request.images is not None for sequence in prefill.sequences)
        for slot in prefill.slots:
            self._table.hold(slot, () if has_images else prefill.tokens)

    def release(self, slots: Iterable[int], failed: Set[int] = frozenset()) -> None:
        """Remove the sequences in these slots; the last sequences move into the gaps. The cache of a slot that is not
        in `failed` may be reused."""
        for slot in sorted(slots, reverse=True):
            tokens = () if slot in failed else self.running[slot].reusable_tokens
            last = self.running.pop()
            if slot < len(self.running):
                self.running[slot] = last
            self._table.release(slot, len(self.running), tokens, last.length - 1)

    def requeue(self) -> None:
        """Return all running sequences to the front of the queue; they keep their output and lose their slots."""
        sequences = self.running.copy()
        self.release(range(len(sequences)))
        for sequence in sequences:
            sequence.has_stale_kv = False
        self.waiting.extendleft(reversed(sequences))

    def drop(self, is_dropped: Callable[[Sequence], bool]) -> list[Sequence]:
        """Remove and return the waiting and running sequences for which the predicate holds."""
        slots = [slot for slot, sequence in enumerate(self.running) if is_dropped(sequence)]
        dropped = [self.running[slot] for slot in slots]
        self.release(slots)
        dropped += [sequence for sequence in self.waiting if is_dropped(sequence)]
        self.waiting = deque(sequence for sequence in self.waiting if not is_dropped(sequence))
        return dropped
