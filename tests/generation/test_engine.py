from __future__ import annotations

import concurrent.futures
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from testing_lite import logprobs_by, slow_down
from tiny_models import EOS, build, config, tokenizer
from transformers import PreTrainedModel

from arealite.generation import engine as engine_module
from arealite.generation.engine import GenerationEngine
from arealite.generation.model_runner import ModelRunner
from arealite.generation.request import (
    FinishReason,
    GenerationError,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)

Start = Callable[..., GenerationEngine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts an engine on a fresh model."""
    engines = []

    def start(*, slots: int = 8, context: int = 256, deterministic: bool = False) -> GenerationEngine:
        runner = ModelRunner(build(config(), seed=0), slots=slots, context=context, deterministic=deterministic)
        engines.append(GenerationEngine(runner, eos_ids=frozenset({EOS}), tokenizer=tokenizer()))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def request(prompt: list[int], *, rid: str = "r", **params: object) -> GenerationRequest:
    return GenerationRequest(rid, tuple(prompt), SamplingParams(**{"ignore_eos": True, **params}))


def run(engine: GenerationEngine, *requests: GenerationRequest) -> list[GenerationResult]:
    return [future.result(120) for future in [engine.submit(one) for one in requests]]


def wait_for_tokens(engine: GenerationEngine, count: int) -> None:
    """Return once that many tokens were generated; from now on each takes so long that a test can act meanwhile."""
    slow_down(engine._runner.model)
    deadline = time.monotonic() + 120
    while engine.call(engine.stats).result(120).generated_tokens < count:
        assert time.monotonic() < deadline


def assert_logprobs(model: PreTrainedModel, one: GenerationRequest, result: GenerationResult) -> None:
    temperature = 1.0 if one.params.greedy else one.params.temperature
    expected = logprobs_by(model, list(one.input_ids), result.output_ids, temperature)
    assert torch.allclose(torch.tensor(result.logprobs), expected, atol=1e-4)


def many_requests(count: int, *, max_new_tokens: int = 40) -> list[GenerationRequest]:
    """Return requests of all kinds; some share their prompt."""
    rng = random.Random(3)
    prompts = [[rng.randrange(2, 48) for _ in range(rng.randint(1, 30))] for _ in range(count // 3 + 1)]
    return [
        request(
            prompts[i // 3],
            seed=i,
            temperature=rng.choice([0.0, 0.7, 1.0, 1.3]),
            max_new_tokens=rng.randint(1, max_new_tokens),
        )
        for i in range(count)
    ]


def test_logprobs_of_random_arrivals_equal_the_models_own_forward(start: Start) -> None:
    engine = start(slots=5)
    requests, futures = many_requests(40), []
    for i, one in enumerate(requests):
        futures.append(engine.submit(one))
        if i % 4 == 0:
            time.sleep(0.002)
    model = build(config(), seed=0)
    for one, future in zip(requests, futures):
        result = future.result(120)
        assert len(result.output_ids) == len(result.logprobs) == one.params.max_new_tokens
        assert result.finish_reason == FinishReason("length")
        assert_logprobs(model, one, result)


def test_deterministic_bits_of_random_arrivals_equal_those_one_by_one(start: Start) -> None:
    engine = start(slots=5, deterministic=True)
    requests = many_requests(16)
    futures = []
    for i, one in enumerate(requests):
        futures.append(engine.submit(one))
        if i % 5 == 0:
            time.sleep(0.002)
    together = [future.result(120) for future in futures]
    alone = [run(engine, one)[0] for one in requests]
    for a, b in zip(together, alone):
        assert (a.output_ids, a.logprobs) == (b.output_ids, b.logprobs)


def test_interrupted_and_continued_equals_uninterrupted(start: Start) -> None:
    engine = start()
    prompt = [5, 6, 7]
    [whole] = run(engine, request(prompt, seed=11, max_new_tokens=100))
    output: list[int] = []
    logprobs: list[float] = []
    interruptions = 0
    while len(output) < 100:
        before = engine.stats().generated_tokens
        future = engine.submit(request(prompt + output, seed=11, max_new_tokens=100 - len(output)))
        enough = min(random.Random(interruptions).randint(1, 25), 100 - len(output))
        wait_for_tokens(engine, before + enough)
        engine.pause().result(120)
        part = future.result(120)
        output += part.output_ids
        logprobs += part.logprobs
        interruptions += part.finish_reason.type == "abort"
        engine.resume().result(120)
    assert interruptions >= 3
    assert output == whole.output_ids
    assert logprobs == pytest.approx(whole.logprobs, abs=1e-4)


def test_an_update_while_generating_stamps_spans_and_uses_no_old_cache(start: Start) -> None:
    engine = start()
    prompt = [5, 6, 7, 8]
    requests = [request(prompt, seed=i, max_new_tokens=120) for i in range(3)]
    futures = [engine.submit(one) for one in requests]
    wait_for_tokens(engine, 90)
    new = build(config(), seed=5)
    engine.update_weights({name: p.detach() for name, p in new.named_parameters()}, "1").result(120)
    assert engine.version == "1"
    old = build(config(), seed=0)
    for future in futures:
        result = future.result(120)
        first, second = result.version_spans
        assert (first.version, first.start, second.version, second.end) == ("0", 0, "1", 120)
        assert 20 < first.end == second.start < 120
        scored_by_old = logprobs_by(old, prompt, result.output_ids)
        scored_by_new = logprobs_by(new, prompt, result.output_ids)
        cut = first.end
        assert torch.allclose(torch.tensor(result.logprobs[:cut]), scored_by_old[:cut], atol=1e-4)
        assert torch.allclose(torch.tensor(result.logprobs[cut:]), scored_by_new[cut:], atol=1e-4)
        assert not torch.allclose(scored_by_old[cut:], scored_by_new[cut:], atol=0.1)
        assert result.version == "1"


def test_context_and_token_limits(start: Start) -> None:
    engine = start(context=32)
    [full, one_token] = run(engine, request([5] * 30, max_new_tokens=10), request([5] * 31, max_new_tokens=10))
    assert (len(full.output_ids), full.finish_reason.type) == (2, "length")
    assert (len(one_token.output_ids), one_token.finish_reason.type) == (1, "length")


def test_stop_tokens_end_a_sequence_and_are_kept(start: Start) -> None:
    engine = start()
    [free] = run(engine, request([5], seed=1, max_new_tokens=60))
    stop = free.output_ids[10]
    first = free.output_ids.index(stop)
    [stopped] = run(engine, request([5], seed=1, max_new_tokens=60, stop_token_ids=(stop,)))
    assert stopped.output_ids == free.output_ids[: first + 1]
    assert stopped.finish_reason == FinishReason("stop", stop)
    [later] = run(engine, request([5], seed=1, max_new_tokens=60, stop_token_ids=(stop,), min_new_tokens=30))
    assert stop not in later.output_ids[:30]


def test_end_of_sequence_stops_unless_ignored(start: Start) -> None:
    engine = start()
    requests = [request([5], seed=i, max_new_tokens=100, ignore_eos=False) for i in range(10)]
    stopped = [result for result in run(engine, *requests) if result.finish_reason.type == "stop"]
    assert stopped
    for result in stopped:
        assert result.finish_reason.matched == EOS
        assert result.output_ids.index(EOS) == len(result.output_ids) - 1
    ignoring = run(engine, *(request([5], seed=i, max_new_tokens=100) for i in range(10)))
    assert all(len(result.output_ids) == 100 for result in ignoring)


def test_an_error_in_the_forward_pass_fails_everyone_once_and_for_all() -> None:
    model = build(config(), seed=0)
    engine = GenerationEngine(ModelRunner(model, slots=2, context=64))
    futures = [engine.submit(request([5 + i], max_new_tokens=60)) for i in range(4)]

    def fail(*_: object) -> None:
        raise RuntimeError("the chip melted")

    model.register_forward_pre_hook(fail)
    for future in futures:
        with pytest.raises(GenerationError, match="the chip melted"):
            future.result(120)
    with pytest.raises(GenerationError, match="the chip melted"):
        engine.stopped.result(120)
    with pytest.raises(GenerationError):
        engine.submit(request([5]))
    engine.close()


def test_a_thread_that_cannot_start_fails_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(threads: int) -> None:
        raise RuntimeError(f"no {threads} cores")

    monkeypatch.setattr(engine_module.cores, "compute_with", fail)
    engine = GenerationEngine(ModelRunner(build(config(), seed=0), slots=2, context=64))
    with pytest.raises(GenerationError, match="no 1 cores"):
        engine.stopped.result(120)
    with pytest.raises(GenerationError):
        engine.submit(request([5]))


def test_a_step_that_hangs_does_not_keep_others_from_closing(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, may_end = start(), threading.Event()
    hanging = engine.call(may_end.wait)
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "_CLOSE_S", 0.1)
        engine.close()
    assert not hanging.done() and "generation did not end within 0.1 s" in caplog.text
    may_end.set()
    assert hanging.result(120) and engine.stopped.result(120) is None


def test_closing_answers_everyone(start: Start) -> None:
    engine = start(slots=1)
    futures = [engine.submit(request([5], max_new_tokens=250, seed=i)) for i in range(3)]
    engine.close()
    assert {future.result(0).finish_reason.type for future in futures} == {"abort"}
    engine.stopped.result(0)
    with pytest.raises(GenerationError, match="after its end"):
        engine.resume()


def test_many_threads_may_submit_pause_and_update(start: Start) -> None:
    engine = start(slots=4)
    weights = {name: p.detach() for name, p in build(config(), seed=0).named_parameters()}

    def client(number: int) -> list[str]:
        rng = random.Random(number)
        reasons = []
        for i in range(8):
            future = engine.submit(request([5 + number], rid=str(number), seed=i, max_new_tokens=rng.randint(1, 40)))
            match rng.randrange(6):
                case 0:
                    engine.pause("retract")
                    engine.resume()
                case 1:
                    engine.update_weights(weights, str(i))
                case 2:
                    engine.pause()
                    engine.resume()
            reasons.append(future.result(120).finish_reason.type)
        return reasons

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        reasons = [reason for reasons in pool.map(client, range(6)) for reason in reasons]
    assert len(reasons) == 48 and set(reasons) <= {"abort", "length"}
    assert engine.stats().running == engine.stats().waiting == 0
