"""Continuous batching in one thread that owns the model; other threads post functions that it runs between two steps.
Invariants: keys and values, also those kept for later requests, are dropped with the weights that computed them, or
with `allow_stale_kv` every token sampled on them is counted; each token has the version that sampled it; an error in a
forward pass fails every request, non-finite logits only the request of their row."""

import contextlib
import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from arealite.generation.model_runner import ModelRunner
from arealite.generation.request import FinishReason, GenerationError, GenerationRequest, GenerationResult
from arealite.generation.sampler import SamplingRows, kept_ids, sample
from arealite.generation.scheduler import Prefill, Scheduler, Sequence, SlotTable
from arealite.utils import cores, heartbeat, trace
from arealite.utils.background import resolve
from arealite.utils.images import placeholder_mask
from arealite.utils.token_ids import StopStrings

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_PREFILL_TOKENS, MAX_PREFILL_TOKENS_GPU = 512, 4096
"""Tokens of one pass, which delays the next token of the running sequences."""
LOG_INTERVAL_S = 5.0
_CLOSE_S = 120.0  # for the last step


@dataclasses.dataclass
class EngineStats:
    """The state of the engine, and counts since its start."""

    slots: int
    version: str
    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0  # of sequences that were given a slot, including what they had sampled before
    prefilled_tokens: int = 0  # prompt tokens that were computed; a slot held the keys and values of the others already
    stale_kv_tokens: int = 0  # generated tokens that were sampled on keys and values of older weights
    is_paused: bool = False


class GenerationEngine:
    """Samples completions from one model."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        eos_ids: frozenset[int] = frozenset(),
        tokenizer: PreTrainedTokenizerBase | None = None,
        version: str = "0",
        threads: int = 1,
        allow_stale_kv: bool = False,
    ) -> None:
        """Start the thread. Only stop strings need a `tokenizer`."""
        self.context, self.vocab_size, self.version = runner.cache.context, runner.vocab_size, version
        self.dtype = str(runner.model.dtype).removeprefix("torch.")
        self.weight_shapes = runner.weight_shapes
        self.image_token_id: int = getattr(runner.model.config, "image_token_id", -1)
        self.stopped: Future[None] = Future()  # done when the thread ends: None after `close`, or why it failed
        self._runner, self._eos_ids, self._tokenizer = runner, eos_ids, tokenizer
        self._threads, self._allow_stale_kv = threads, allow_stale_kv
        # A reused prefix differs in its last bits from one that is computed with the rest of the prompt.
        slots, reuses = runner.cache.slots, not runner.deterministic
        self._stats = EngineStats(slots, version)
        self._table = SlotTable(runner.cache, slots=slots, context=self.context, reuses=reuses)
        max_tokens = MAX_PREFILL_TOKENS if runner.device.type == "cpu" else MAX_PREFILL_TOKENS_GPU
        self._scheduler = Scheduler(self._table, slots=slots, max_prefill_tokens=max_tokens)
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._gate = threading.Lock()  # guards `stopped`: no message enters the inbox after its last read
        self._is_paused = self._is_closing = self._awaits_weights = self._has_cancelled = False
        self._rows: SamplingRows | None = None  # parameters of the running sequences; None after those have changed
        self._logged_tokens, self._paused_s, self._unlogged_s = 0, 0.0, 0.0
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    # Called from any thread

    def submit(self, request: GenerationRequest) -> Future[GenerationResult]:
        """Queue a request; ValueError if it can't be sampled. Cancelling the future frees its slot."""
        prompt_length, params = len(request.input_ids), request.params
        if not 0 < prompt_length < self.context:
            raise ValueError(
                f"input_ids must hold 1 to {self.context - 1} tokens: got {prompt_length}. "
                "Shorten the prompt or serve with a larger context."
            )
        unknown = [t for t in (*request.input_ids, *params.stop_token_ids) if not 0 <= t < self.vocab_size]
        if unknown:
            raise ValueError(
                f"token ids must lie in [0, {self.vocab_size}): got {unknown[0]}. Use the tokenizer of this model."
            )
        if request.images is not None:
            placeholder_mask(torch.tensor(request.input_ids), sum(request.images.num_tokens), self.image_token_id)
        if params.stop and self._tokenizer is None:
            raise ValueError(
                f"stop strings must have a tokenizer: got {list(params.stop)}. Serve a folder that has one."
            )
        sequence = Sequence(
            request=request,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids),
            max_length=min(prompt_length + params.max_new_tokens, self.context),
            stops=StopStrings(self._tokenizer, params.stop) if params.stop and self._tokenizer else None,
            length=prompt_length,
        )
        self._post(lambda: self._scheduler.waiting.append(sequence))
        sequence.future.add_done_callback(lambda _: self._forget_cancelled(sequence))
        return sequence.future

    def pause(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> Future[None]:
        """Sample nothing until `resume`. Running requests end with the tokens so far (abort), return to the queue
        (retract), or keep their slots and cache (in_place)."""
        return self.call(lambda: self._hold(mode))

    def resume(self) -> Future[None]:
        """Sample again."""
        return self.call(lambda: self._hold(None))

    def update_weights(
        self,
        weights: Mapping[str, torch.Tensor],
        version: str | None = None,
        *,
        shares: bool = False,
        is_partial: bool = False,
    ) -> Future[None]:
        """Replace all weights between two steps (see `ModelRunner.load_weights`); requests in flight compute their
        cache again, unless `allow_stale_kv`. The owner of shared tensors may change them after `await_weights`."""

        def update() -> None:
            with trace.span("load weights", version=version):
                self._runner.load_weights(weights, shares=shares, is_partial=is_partial)
            self._awaits_weights = False
            for sequence in self._scheduler.running:
                sequence.has_stale_kv = True
            if not self._allow_stale_kv:
                self._requeue()
            self._table.clear()
            self.version = self.version if version is None else version

        return self.call(update)

    def await_weights(self) -> Future[None]:
        """Run no forward pass until `update_weights`, not even after `resume`: the weights are about to change."""
        return self.call(partial(setattr, self, "_awaits_weights", True))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the engine's thread between two steps."""
        future: Future[T] = Future()
        self._post(partial(resolve, future, function))
        return future

    def stats(self) -> EngineStats:
        """Return current numbers, at most one step old."""
        return dataclasses.replace(
            self._stats,
            version=self.version,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            is_paused=self._is_paused or self._awaits_weights,
        )

    def close(self) -> None:
        """Abort everything and end the thread; after the timeout it is left to the end of the process."""

        def close() -> None:
            self._abort(lambda _: True)
            self._is_closing = True

        with contextlib.suppress(GenerationError):  # the thread has ended already
            self._post(close)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.error("generation did not end within %g s: a step hangs in the thread `generation`", _CLOSE_S)

    def _post(self, message: Callable[[], object]) -> None:
        with self._gate:
            if self.stopped.done():
                raise GenerationError("the engine must run: got a call after its end. Restart the server.")
            self._inbox.put(message)

    def _forget_cancelled(self, sequence: Sequence) -> None:
        """Drop a sequence whose future was cancelled, and in one scan all others that were cancelled meanwhile."""
        if sequence.future.cancelled():
            self._has_cancelled = True
            with contextlib.suppress(GenerationError):  # the engine has ended and dropped all sequences
                self._post(self._drop_cancelled)

    def _drop_cancelled(self) -> None:
        if self._has_cancelled:
            self._has_cancelled = False
            self._abort(lambda sequence: sequence.future.cancelled())

    # Called from the engine's thread

    def _run(self) -> None:
        try:
            cores.compute_with(self._threads)
            with torch.inference_mode():
                while not self._is_closing:
                    self._run_inbox()
                    if self._has_work():
                        started = time.monotonic()
                        self._step()
                        heartbeat.tick()
                        self._log_progress(time.monotonic() - started)
            self._end(None)
        except BaseException as error:
            logger.exception("generation failed")
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Refuse further messages and resolve all futures."""
        cause = "closing" if error is None else f"{type(error).__name__}: {error}"
        failure = GenerationError(f"the engine must run: got {cause}. Restart the server.")
        with self._gate:
            self.stopped.set_result(None) if error is None else self.stopped.set_exception(failure)
        while not self._inbox.empty():
            self._inbox.get_nowait()()
        for sequence in self._scheduler.drop(lambda _: True):
            self._resolve(sequence, failure)

    def _has_work(self) -> bool:
        is_held = self._is_paused or self._awaits_weights
        return not is_held and bool(self._scheduler.running or self._scheduler.waiting)

    def _run_inbox(self) -> None:
        """Run the messages in the inbox; if there is nothing to sample, wait for a message."""
        while not self._is_closing:
            try:
                message = self._inbox.get(block=not self._has_work())
            except queue.Empty:
                return
            message()

    def _step(self) -> None:
        """Admit new sequences and prefill what no slot holds of them, then decode a token of every running sequence."""
        first_new = len(self._scheduler.running)
        if prefills := self._scheduler.admit():
            with trace.span("prefill", tokens=sum(len(prefill.tokens) - prefill.start for prefill in prefills)):
                logits = self._prefill(prefills)
            if first_new < len(self._scheduler.running):
                self._rows = None
                self._sample(logits, first_new)
        running = self._scheduler.running
        if running:
            positions = np.array([sequence.length - 1 for sequence in running])
            images = [sequence.request.images for sequence in running]
            shifts = np.array([0 if seen is None else seen.position_shift for seen in images])
            last = [sequence.output_ids[-1] for sequence in running]
            with trace.span("decode", sequences=len(running)):
                self._sample(self._runner.decode(last, positions, shifts=shifts), 0)

    def _prefill(self, prefills: list[Prefill]) -> torch.Tensor:
        """Fill the slots of new sequences; return the logits after each prompt, `[n, V]`."""
        logits = self._runner.prefill(
            [prefill.tokens for prefill in prefills],
            [prefill.first_slot for prefill in prefills],
            [prefill.sequences[0].request.images if prefill.sequences else None for prefill in prefills],
            [prefill.start for prefill in prefills],
        )
        for prefill in prefills:
            self._runner.cache.copy(prefill.first_slot, prefill.slots[1:], len(prefill.tokens))
            self._scheduler.prefilled(prefill)
            self._stats.prompt_tokens += len(prefill.tokens) * len(prefill.sequences)
            self._stats.prefilled_tokens += len(prefill.tokens) - prefill.start
        repeats = torch.tensor([len(prefill.sequences) for prefill in prefills], device=logits.device)
        return logits.repeat_interleave(repeats, 0)

    def _sample(self, logits: torch.Tensor, first: int) -> None:
        """Sample a token for each sequence from slot `first` on, `logits` [n, V], and release those that end."""
        sequences = self._scheduler.running[first:]
        rows = self._rows if first == 0 else None
        if rows is None:
            rows = SamplingRows(
                [(seq.request.params, len(seq.request.input_ids), seq.stop_ids) for seq in sequences],
                self.vocab_size,
                logits.device,
            )
        if first == 0:
            self._rows = rows
        tokens, logprobs, all_logprobs = sample(logits, rows, np.array([sequence.length for sequence in sequences]))
        with_kept = [row for row, sequence in enumerate(sequences) if sequence.request.returns_kept]
        kept = dict(zip(with_kept, kept_ids(all_logprobs[with_kept]))) if with_kept else {}
        self._stats.generated_tokens += len(sequences)
        ended: dict[int, FinishReason | GenerationError] = {}
        for slot, (sequence, token, logprob) in enumerate(zip(sequences, tokens.tolist(), logprobs.tolist()), first):
            if not math.isfinite(logprob):
                ended[slot] = GenerationError("logits must be finite: got NaN or inf. Check the weights.")
                continue
            self._stats.stale_kv_tokens += sequence.has_stale_kv
            sequence.kept += [kept[slot - first]] if slot - first in kept else []
            if (reason := sequence.append(token, logprob, self.version)) is not None:
                ended[slot] = reason
        if ended:
            failed = {slot for slot, outcome in ended.items() if isinstance(outcome, GenerationError)}
            for slot in failed:
                self._runner.cache.erase(slot, sequences[slot - first].length)
            self._scheduler.release(ended, failed)
            self._rows = None
        for slot, outcome in ended.items():
            self._resolve(sequences[slot - first], outcome)

    def _hold(self, mode: str | None) -> None:
        if self._is_paused:
            trace.record("paused", self._paused_s, time.monotonic())
        self._is_paused, self._paused_s = mode is not None, time.monotonic()
        if mode == "abort":
            self._abort(lambda _: True)
        elif mode == "retract":
            self._requeue()

    def _requeue(self) -> None:
        self._scheduler.requeue()
        self._rows = None

    def _abort(self, is_aborted: Callable[[Sequence], bool]) -> int:
        aborted = self._scheduler.drop(is_aborted)
        self._rows = None
        for sequence in aborted:
            message = "Aborted" if sequence.output_ids else "Abort before prefill"
            self._resolve(sequence, FinishReason("abort", message=message))
        return len(aborted)

    def _resolve(self, sequence: Sequence, outcome: FinishReason | GenerationError) -> None:
        if not sequence.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, GenerationError):
            sequence.future.set_exception(outcome)
        else:
            output, counts = (sequence.output_ids, sequence.logprobs), (sequence.num_stale_tokens, sequence.kept)
            sequence.future.set_result(GenerationResult(*output, outcome, self.version, sequence.spans, *counts))

    def _log_progress(self, step_s: float) -> None:
        self._unlogged_s += step_s
        if self._unlogged_s < LOG_INTERVAL_S:
            return
        rate = (self._stats.generated_tokens - self._logged_tokens) / self._unlogged_s
        self._unlogged_s, self._logged_tokens = 0.0, self._stats.generated_tokens
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        logger.info("running %d | waiting %d | %.0f tok/s | version %s", running, waiting, rate, self.version)
