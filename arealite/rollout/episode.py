"""One attempt at an episode, and how code deep inside a workflow finds the attempt it runs in.

The executor sets `current_episode` around a workflow; tasks that the workflow starts inherit it. The inference client
reads it to derive sampling seeds, and notes in it what each completion was and which servers took part. Seeds depend
on nothing that timing can change as long as a workflow starts its samples in a fixed order.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from arealite.api.io_struct import PromptId


@dataclass(frozen=True)
class SampleRecord:
    """One completion that ended."""

    sample: int
    """Its number in the episode, in the order of the requests."""
    tokens: int
    latency_s: float
    num_interrupts: int
    server: str
    """The last one that sampled a token of it."""


@dataclass
class Episode:
    """One attempt at one prompt."""

    prompt_id: PromptId
    attempt: int
    head_version: int
    seed: int
    """Of the run."""
    num_samples: int = 0
    """Completions requested so far."""
    servers: set[str] = field(default_factory=set)
    """Addresses that sampled a token of it."""
    samples: list[SampleRecord] = field(default_factory=list)
    """Completions that ended, in that order."""
    deadline: asyncio.Timeout | None = None
    """Of the attempt, while it runs."""
    num_standing: int = 0
    """Requests that no server can take at present."""
    left_s: float = 0.0
    """Until the deadline, as it was when the clock stopped."""

    @contextlib.contextmanager
    def standstill(self) -> Iterator[None]:
        """Stop the clock of the attempt while a request of its waits for any server at all."""
        loop, deadline = asyncio.get_running_loop(), self.deadline
        if deadline is not None and self.num_standing == 0:
            self.left_s = (deadline.when() or loop.time()) - loop.time()
            deadline.reschedule(None)
        self.num_standing += 1
        try:
            yield
        finally:
            self.num_standing -= 1
            if deadline is not None and self.num_standing == 0:
                with contextlib.suppress(RuntimeError):  # the attempt has ended
                    deadline.reschedule(loop.time() + self.left_s)

    def next_sample(self) -> int:
        """Number the next completion."""
        self.num_samples += 1
        return self.num_samples - 1

    def sampling_seed(self, sample: int) -> int:
        """Return the sampling seed of a completion."""
        return sampling_seed(self.seed, self.prompt_id, sample=sample, attempt=self.attempt)


current_episode: ContextVar[Episode | None] = ContextVar("current_episode", default=None)


def sampling_seed(run_seed: int, prompt_id: PromptId, *, sample: int, attempt: int) -> int:
    """Derive 48 bits (exact in JSON everywhere) from what names a completion."""
    key = f"{run_seed}/{prompt_id.epoch}/{prompt_id.index}/{sample}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big")
