"""Assigns sequences to slots: pure bookkeeping, no tensors. Invariant: `running[i]` occupies slot i."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from arealite.generation.request import FinishReason, GenerationRequest, GenerationResult, VersionSpan
from arealite.utils.images import Images
from arealite.utils.stop_strings import StopStrings


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
    """Sequences with equal tokens and images (a group's samples): the first slot is computed, others are copies."""

    tokens: tuple[int, ...]
    sequences: list[Sequence]
    first_slot: int


class Scheduler:
    """First come, first served, into `slots` slots."""

    def __init__(self, *, slots: int, max_prefill_tokens: int, move: Callable[[int, int, int], None]) -> None:
        """`move(source, destination, length)` moves a cache; `max_prefill_tokens` bounds a prefill of many prompts."""
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._slots = slots
        self._max_prefill_tokens = max_prefill_tokens
        self._move = move

    def admit(self) -> list[Prefill]:
        """Give free slots to the sequences that wait longest; return what must be prefilled before they decode."""
        free = self._slots - len(self.running)
        # Prefilling one sequence costs a small model as much as decoding all, 14 to 25 % of throughput at random
        # lengths: while others run and more wait than fit, wait until an eighth of the slots is free.
        if self.running and free < min(len(self.waiting), self._slots // 8):
            return []
        groups: dict[tuple[tuple[int, ...], Images | None], list[Sequence]] = {}
        num_tokens = 0
        while self.waiting and free:
            prompt = self.waiting[0].tokens, self.waiting[0].request.images
            if prompt not in groups:
                num_tokens += len(prompt[0])
                if groups and num_tokens > self._max_prefill_tokens:
                    break
            groups.setdefault(prompt, []).append(self.waiting.popleft())
            free -= 1
        prefills = []
        for (tokens, _), sequences in groups.items():
            prefills.append(Prefill(tokens, sequences, len(self.running)))
            self.running.extend(sequences)
        return prefills

    def release(self, slots: Iterable[int]) -> None:
        """Remove the sequences in these slots; the last sequences move into the gaps."""
        for slot in sorted(slots, reverse=True):
            last = self.running.pop()
            if slot < len(self.running):
                self.running[slot] = last
                self._move(len(self.running), slot, last.length - 1)

    def requeue(self) -> None:
        """Return all running sequences to the front of the queue; they keep their output and lose their cache."""
        for sequence in self.running:
            sequence.has_stale_kv = False
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()

    def drop(self, is_dropped: Callable[[Sequence], bool]) -> list[Sequence]:
        """Remove and return the waiting and running sequences for which the predicate holds."""
        slots = [slot for slot, sequence in enumerate(self.running) if is_dropped(sequence)]
        dropped = [self.running[slot] for slot in slots]
        self.release(slots)
        dropped += [sequence for sequence in self.waiting if is_dropped(sequence)]
        self.waiting = deque(sequence for sequence in self.waiting if not is_dropped(sequence))
        return dropped
