"""Prompts: the record of a prompt through a run, and of an attempt at it; the source that pulls prompts.

The inference client reads the current attempt from `current_episode`, which tasks of the workflow inherit. Invariant:
every row of a `PromptSource` has a `prompt_id`, unique in that source.
"""

import asyncio
import contextlib
import hashlib
import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from arealite.api.io_struct import ModelRequest, PromptId
from arealite.api.workflow_api import OutsideRows, RolloutWorkflow

if TYPE_CHECKING:
    from tensordict import TensorDict

Row = dict[str, Any]
Dataloader = Iterable[list[Row]] | OutsideRows
ShouldAccept = Callable[["TensorDict"], bool]


@dataclass(frozen=True)
class SampleRecord:
    """A finished completion."""

    sample: int  # number in the episode, in request order
    tokens: int
    latency_s: float
    num_interrupts: int
    server: str  # the last one that sampled its tokens


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt and its state, from issued to trained, rejected or failed."""

    prompt_id: PromptId
    row: Row = field(default_factory=dict)
    workflow: RolloutWorkflow | None = None  # None after recovery, until the dataloader fetches the row again
    should_accept: ShouldAccept | None = None  # None if a filter of `wait` may still reject it
    attempt: int = 0
    is_repeatable: bool = True  # external rows have one attempt
    first_started_s: float | None = None  # loop time of the first attempt's start

    # Kept by the ledger
    ticket: int = 0
    is_counted: bool = True  # whether the staleness bound counts it
    issued_at: int = 0  # position in the ledger
    issued_unix_s: float = 0.0
    state: str = "issued"
    reason: str | None = None
    head_version: int = -1  # trainer's version at the start of the attempt; -1 before the first
    trained_version: int | None = None
    latency_s: float | None = None


@dataclass(eq=False)
class Episode:
    """One attempt at one prompt."""

    prompt: Prompt
    attempt: int
    head_version: int
    seed: int  # seed of the run
    num_samples: int = 0  # completions requested so far
    num_asked: Counter[str] = field(default_factory=Counter)  # by seed_key and digest of the prompt
    servers: set[str] = field(default_factory=set)  # addresses of servers that sampled its tokens
    newest_version: int = -1  # newest weight version of its tokens
    is_narrowed: bool = False  # whether top_p, top_k or min_p restricted a completion
    samples: list[SampleRecord] = field(default_factory=list)  # completions, in the order of their ends
    rewards: list[float] = field(default_factory=list)  # of the returned trajectory, also of a rejected one
    table: Any = None  # where its rows of the rollout file are, if another process has built them
    trajectory: "TensorDict" = field(init=False, repr=False)  # set once the attempt is accepted
    deadline: asyncio.Timeout | None = None  # of the running attempt
    num_waiting_for_servers: int = 0  # requests that no server can take now
    left_s: float = 0.0  # remaining time while the clock is stopped

    @property
    def prompt_id(self) -> PromptId:
        return self.prompt.prompt_id

    @property
    def has_time(self) -> bool:
        """Whether the attempt has time left, or its clock is stopped."""
        when = None if self.deadline is None else self.deadline.when()
        return self.num_waiting_for_servers > 0 or (when is not None and when > asyncio.get_running_loop().time())

    @contextlib.contextmanager
    def standstill(self) -> Iterator[None]:
        """Stop the clock of the attempt while one of its requests waits because no server can take it."""
        loop, deadline = asyncio.get_running_loop(), self.deadline
        if deadline is not None and self.num_waiting_for_servers == 0:
            self.left_s = (deadline.when() or loop.time()) - loop.time()
            deadline.reschedule(None)
        self.num_waiting_for_servers += 1
        try:
            yield
        finally:
            self.num_waiting_for_servers -= 1
            if deadline is not None and self.num_waiting_for_servers == 0:
                with contextlib.suppress(RuntimeError):  # raised once the attempt has ended
                    deadline.reschedule(loop.time() + self.left_s)

    def next_sample(self, req: ModelRequest) -> tuple[int, int]:
        """Return the number and the sampling seed of the next completion."""
        self.num_samples, number = self.num_samples + 1, self.num_samples
        sample: int | str = number
        if req.seed_key is not None:
            asked = f"{req.seed_key}/{hashlib.blake2b(array('q', req.input_ids).tobytes(), digest_size=16).hexdigest()}"
            sample = f"{asked}/{self.num_asked[asked]}"
            self.num_asked[asked] += 1
        return number, sampling_seed(self.seed, self.prompt_id, sample=sample, attempt=self.attempt)


Keep: TypeAlias = Callable[[Episode], None]
"""Callback that receives an episode once it is accepted, in the event loop."""

current_episode: ContextVar[Episode | None] = ContextVar("current_episode", default=None)


def sampling_seed(run_seed: int, prompt_id: PromptId, *, sample: int | str, attempt: int) -> int:
    """Derive a 48-bit seed (exact in JSON) from the identity of a completion.

    It does not depend on timing if the workflow starts its samples in a fixed order or names its runs (`seed_key`).
    """
    key = f"{run_seed}/{prompt_id.epoch}/{prompt_id.index}/{sample}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big")


class PromptSource:
    """Pulls batches of rows from a dataloader and restarts it at its end."""

    def __init__(self, dataloader: Dataloader) -> None:
        self.dataloader = dataloader
        self._batches = self._cycle()
        self._error: Exception | None = None
        self._rewards: dict[str, list[float]] = {}  # by source of a mixture, since the last `metrics`

    def of(self, dataloader: Dataloader) -> "PromptSource":
        """Return this source. Raises ValueError for another dataloader."""
        if self.dataloader is not dataloader:
            raise ValueError(
                f"prepare_batch must get one dataloader in a run: got a second one, {type(dataloader).__name__}, whose "
                "prompts would have the names of the first one's. Put all rows into one data set, in the order of a "
                "curriculum with shuffle=false."
            )
        return self

    def prompts(self, num: int, workflow: RolloutWorkflow, should_accept: ShouldAccept) -> list[Prompt]:
        """Pull batches until there are at least `num` rows."""
        rows: list[Row] = []
        while len(rows) < num:
            rows += self._pull()
        return [Prompt(row["prompt_id"], row, workflow, should_accept) for row in rows]

    def _pull(self) -> list[Row]:
        if self._error is not None:
            raise RuntimeError(
                f"the dataloader must not fail: it has raised {type(self._error).__name__}: {self._error}, and rows "
                "may be missing since. Resume the run, or start it again."
            ) from self._error
        try:
            return next(self._batches)
        except Exception as error:
            self._error = error
            raise

    def cursor(self) -> Mapping[str, Any] | None:
        """Return the dataloader's position; None if it has no `state_dict`."""
        state_dict = getattr(self.dataloader, "state_dict", None)
        return None if state_dict is None else state_dict()

    def note_rewards(self, rewards: Mapping[PromptId, Sequence[float]]) -> None:
        """Add the rewards of trained prompts to their sources in a mixture."""
        source_of = getattr(self.dataloader, "source_of", lambda _: None)
        for prompt_id, each in rewards.items():
            if (name := source_of(prompt_id)) is not None:
                self._rewards.setdefault(name, []).extend(each)

    def metrics(self) -> dict[str, float]:
        """Return the mean reward of each source that gave prompts since the last call."""
        rewards, self._rewards = self._rewards, {}
        return {f"reward/mean/{name}": sum(each) / len(each) for name, each in rewards.items()}

    def require_fetch(self) -> Callable[[PromptId], Row]:
        """Return the dataloader's `fetch`. Raises ValueError if it can't find a row again by its id."""
        fetch: Callable[[PromptId], Row] | None = getattr(self.dataloader, "fetch", None)
        if fetch is None:
            raise ValueError(
                "the dataloader of a run that resumes from checkpoints must name its rows and `fetch(prompt_id)` them: "
                f"got {type(self.dataloader).__name__}. Use PromptLoader, or set recover.mode=disabled."
            )
        return fetch

    def _cycle(self) -> Iterator[list[Row]]:
        for epoch in itertools.count():
            index = 0
            assert not isinstance(self.dataloader, OutsideRows), "external rows are pushed, not pulled"
            for rows in self.dataloader:
                yield [named(row, PromptId(epoch, index + offset)) for offset, row in enumerate(rows)]
                index += len(rows)
            if index == 0:
                raise ValueError(
                    "the dataloader must yield rows: got none in a whole pass. Check that it is not an exhausted "
                    "iterator and that batch_size fits the data set."
                )


def external_prompt(number: int, row: Row, workflow: RolloutWorkflow, should_accept: ShouldAccept) -> Prompt:
    """Return the prompt of the run's `number`th external row."""
    row = named(row, PromptId(0, number))
    return Prompt(row["prompt_id"], row, workflow, should_accept, is_repeatable=False)


def named(row: object, prompt_id: PromptId) -> Row:
    """Return the row with its own `prompt_id`, or the given one."""
    if not isinstance(row, Mapping):
        raise ValueError(
            f"rows must come as a list of dicts: got one that is {row!r:.100}. Use PromptLoader, or give a DataLoader "
            "of torch collate_fn=list, as its own makes one dict of all rows."
        )
    if not isinstance(own := row.get("prompt_id", prompt_id), PromptId):
        raise ValueError(
            f"the column prompt_id of a row must be a PromptId: got {own!r:.100}. Rename a column of the data set that "
            "happens to have this name."
        )
    return {**row, "prompt_id": own}
