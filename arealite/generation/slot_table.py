"""Which tokens each slot of the KV cache holds, so that a new sequence computes only what no slot holds yet.

Running sequences occupy slots 0..n-1. The slots behind them keep what ended sequences left (the turns of a conversation
so far) until a running sequence needs the slot; the least recently used goes first. One more slot, `spare`, holds a
long prompt that is prefilled in chunks. Invariant: slot s holds the keys and values of `tokens_SC[s, :lengths_S[s]]`,
computed by the current weights."""

# S slots, C context

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MIN_PREFIX_TOKENS = 16
"""Shorter prefixes cost more to find and copy than to compute."""


class Cache(Protocol):
    """The keys and values themselves."""

    def copy(self, source: int, destinations: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of one slot into others."""

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange the first `length` tokens of two slots."""


class SlotTable:
    """The contents of `slots` slots and the spare one."""

    def __init__(self, cache: Cache, *, slots: int, context: int, reuses: bool = True) -> None:
        """With `reuses` False no slot counts as holding anything, so every prompt is computed whole."""
        self.spare = slots
        self.reuses = reuses
        self._cache = cache
        self._tokens_SC = np.zeros((slots + 1, context), dtype=np.int32)  # mapped when first touched
        self._lengths_S = np.zeros(slots + 1, dtype=np.int64)
        self._used_S = np.zeros(slots + 1, dtype=np.int64)  # when, in uses of the table; 0 for an empty slot
        self._num_uses = 0
        self._num_touched = 0  # slots that ever ran a sequence: nothing is kept in others, so that it costs no memory

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return a slot with the longest prefix of `tokens`, and its length; the last token is never part of it, as its
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

    def claim(self, slot: int, tokens: Sequence[int]) -> int:
        """Give the first free slot, or the spare one, to a sequence; return how many of its tokens the slot holds.

        An ended sequence that the new one continues is taken over; of any other the shared prefix is copied."""
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
        """Empty a slot; its contents move behind it to where less recently used ones lie, if any do."""
        length, behind = int(self._lengths_S[slot]), self._used_S[slot + 1 : self._num_touched][::-1]
        if length and len(behind) and behind.min() < self._used_S[slot]:
            victim = self._num_touched - 1 - int(behind.argmin())
            self._cache.copy(slot, [victim], length)
            self._set(victim, self._tokens_SC[slot, :length], int(self._used_S[slot]))
        self._set(slot, (), 0)

    def hold(self, slot: int, tokens: Sequence[int]) -> None:
        """Note that a slot holds the keys and values of these tokens."""
        self._set(slot, tokens if self.reuses else (), 0)
        self._touch(slot)
        if slot != self.spare:
            self._num_touched = max(self._num_touched, slot + 1)

    def release(self, slot: int, last: int, tokens: Sequence[int], last_length: int) -> None:
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
        """Forget all contents: other weights would compute other ones."""
        self._lengths_S[:] = self._used_S[:] = 0

    def _touch(self, slot: int) -> None:
        self._num_uses += 1
        self._used_S[slot] = self._num_uses if self._lengths_S[slot] else 0

    def _set(self, slot: int, tokens: Sequence[int] | NDArray[np.int32], used: int) -> None:
        self._tokens_SC[slot, : len(tokens)] = tokens
        self._lengths_S[slot], self._used_S[slot] = len(tokens), used

    def _swap(self, one: int, other: int, length: int = 0) -> None:
        """Exchange two slots, of which `length` tokens matter, or those that the table knows of."""
        if one == other:
            return
        pair, reverse = [one, other], [other, one]
        known = int(self._lengths_S[pair].max())
        self._cache.swap(one, other, max(length, known))
        self._tokens_SC[pair, :known] = self._tokens_SC[reverse, :known]
        self._lengths_S[pair], self._used_S[pair] = self._lengths_S[reverse], self._used_S[reverse]
