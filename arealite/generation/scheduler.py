"""Assigns sequences to slots: pure bookkeeping, no tensors. Invariant: `running[i]` occupies slot i."""

from collections import deque
from collections.abc import Callable, Iterable, Set
from concurrent.futures import Future
from dataclasses import dataclass, field

from arealite.generation.request import FinishReason, GenerationRequest, GenerationResult, VersionSpan
from arealite.generation.slot_table import SlotTable
from arealite.utils.images import Images
from arealite.utils.token_ids import StopStrings


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
    def tokens(self) -> tuple[int, ...]:
        return (*self.request.input_ids, *self.output_ids)

    @property
    def reusable_tokens(self) -> tuple[int, ...]:
        """Those whose keys and values a later sequence may use: images and older weights would make them others."""
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
    computed, others are copies. Without sequences: a chunk of a long prompt, in the spare slot."""

    tokens: tuple[int, ...]
    start: int
    sequences: list[Sequence]
    first_slot: int

    @property
    def slots(self) -> range:
        return range(self.first_slot, self.first_slot + max(len(self.sequences), 1))


class Scheduler:
    """First come, first served, into `slots` slots."""

    def __init__(self, table: SlotTable, *, slots: int, max_prefill_tokens: int) -> None:
        """`max_prefill_tokens` bounds one pass: a longer prompt takes several, if the table can hold a part of it."""
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._table = table
        self._slots = slots
        self._max_prefill_tokens = max_prefill_tokens
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
        groups: dict[tuple[tuple[int, ...], Images | None], list[Sequence]] = {}
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

    def _chunk(self, tokens: tuple[int, ...]) -> Prefill:
        """Compute the next tokens of a prompt that stays in the queue, where the next call finds them."""
        start = self._table.claim(self._table.spare, tokens)
        return Prefill(tokens[: start + self._max_prefill_tokens], start, [], self._table.spare)

    def _place(self, tokens: tuple[int, ...], images: Images | None, sequences: list[Sequence]) -> Prefill:
        """Give the next slots to sequences with equal prompts."""
        first = len(self.running)
        start = self._table.claim(first, tokens if images is None else ())
        for slot in range(first + 1, first + len(sequences)):
            self._table.displace(slot)
        self.running.extend(sequences)
        return Prefill(tokens, start, sequences, first)

    def prefilled(self, prefill: Prefill) -> None:
        """Note that the slots hold the prompt now."""
        has_images = any(sequence.request.images is not None for sequence in prefill.sequences)
        for slot in prefill.slots:
            self._table.hold(slot, () if has_images else prefill.tokens)

    def release(self, slots: Iterable[int], failed: Set[int] = frozenset()) -> None:
        """Remove the sequences in these slots; the last sequences move into the gaps. The cache of those that did not
        fail may be reused."""
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
