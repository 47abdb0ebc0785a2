"""What the engine computes of a prompt, and that the logprobs are those of the model's own forward all the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from test_engine import assert_logprobs, request, run, wait_for_tokens
from tiny_models import build, config
from transformers import PreTrainedModel

from arealite.generation.engine import MAX_PREFILL_TOKENS, GenerationEngine
from arealite.generation.model_runner import ModelRunner
from arealite.generation.request import GenerationError, GenerationResult

Start = Callable[..., GenerationEngine]
RANDOM = random.Random(5)
LONG = [RANDOM.randrange(2, 48) for _ in range(2000)]
PROMPT, TOOL = LONG[:40], LONG[40:55]


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return build(config(max_position_embeddings=2048), seed=seed).to(dtype)


@pytest.fixture
def start() -> Iterator[Start]:
    engines = []

    def start(*, slots: int = 8, dtype: torch.dtype = torch.float32, **options: Any) -> GenerationEngine:
        runner = ModelRunner(model(dtype=dtype), slots=slots, context=2048, deterministic=options.pop("bits", False))
        engines.append(GenerationEngine(runner, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def counts(engine: GenerationEngine) -> tuple[int, int]:
    """Return how many tokens of prompts were computed, and how many there were."""
    stats = engine.call(engine.stats).result(120)
    return stats.prefilled_tokens, stats.prompt_tokens


def converse(engine: GenerationEngine, prompts: Sequence[Sequence[int]], num_turns: int) -> list[GenerationResult]:
    """Let conversations take turns, each with 15 tokens of a tool before it; return the results of the last one."""
    texts, results = [list(prompt) for prompt in prompts], []
    for turn in range(num_turns):
        requests = [request(text, seed=i, max_new_tokens=20 + i) for i, text in enumerate(texts)]
        engine.pause()  # so that all are admitted at once; prompts that come later share those that run
        futures = [engine.submit(one) for one in requests]
        engine.resume()
        results = [future.result(120) for future in futures]
        for text, result in zip(texts, results):
            text += [*result.output_ids, *TOOL]
        if turn:
            for one, result in zip(requests, results):
                assert_logprobs(model(), one, result)
    return results


def test_a_later_turn_computes_only_what_is_new(start: Start) -> None:
    engine = start()
    prompts = [[*PROMPT, first] for first in range(2, 7)]
    converse(engine, prompts, 1)
    whole, total = counts(engine)
    assert total == 5 * 41
    converse(engine, [[*one, *LONG[100:110]] for one in prompts], 1)
    computed, _ = counts(engine)
    assert computed - whole <= 5 * 11
    engine.call(engine._table.clear).result(120)
    before = counts(engine)
    converse(engine, prompts, 4)
    after = counts(engine)
    later_turns = 3 * 5 * (1 + len(TOOL))  # the last token that was sampled is new to the cache
    assert after[0] - before[0] == whole + later_turns


def test_samples_that_come_later_share_the_prompt_of_those_that_run(start: Start) -> None:
    engine = start()
    first = engine.submit(request(PROMPT, max_new_tokens=400))
    wait_for_tokens(engine, 1)
    later = [request(PROMPT, seed=seed, max_new_tokens=10) for seed in range(3)]
    results = run(engine, *later)
    assert not first.done()
    for one, result in zip(later, results):
        assert_logprobs(model(), one, result)
    computed, total = counts(engine)
    assert computed <= 40 + 3 and total == 4 * 40  # one token at most gives a sample its logits


def test_nothing_of_older_weights_is_reused(start: Start) -> None:
    engine = start()
    [first] = run(engine, request(PROMPT, max_new_tokens=20))
    new = model(seed=5)
    engine.update_weights({name: p.detach() for name, p in new.named_parameters()}, "1").result(120)
    one = request([*PROMPT, *first.output_ids, *TOOL], max_new_tokens=20)
    [second] = run(engine, one)
    assert_logprobs(new, one, second)
    assert counts(engine) == (40 + 75, 40 + 75)


def test_a_cache_that_outlives_its_weights_serves_no_other_request(start: Start) -> None:
    engine = start(allow_stale_kv=True)
    running = engine.submit(request(PROMPT, max_new_tokens=120))
    wait_for_tokens(engine, 5)
    new = model(seed=5)
    engine.update_weights({name: p.detach() for name, p in new.named_parameters()}, "1").result(120)
    beside = request([*PROMPT, 3], max_new_tokens=5)
    assert_logprobs(new, beside, run(engine, beside)[0])
    old = running.result(120)
    assert old.stale_kv_tokens > 0
    after = request([*PROMPT, *old.output_ids, *TOOL], max_new_tokens=5)
    assert_logprobs(new, after, run(engine, after)[0])
    computed, total = counts(engine)
    assert total - computed == 40  # of the second request, which used the new weights


def test_retracted_requests_without_an_update_keep_what_was_computed(start: Start) -> None:
    engine = start()
    future = engine.submit(one := request(PROMPT, max_new_tokens=60))
    wait_for_tokens(engine, 10)
    engine.pause("retract").result(120)
    engine.resume().result(120)
    assert_logprobs(model(), one, future.result(120))
    assert counts(engine)[0] == 40 + 1


def test_deterministic_bits_do_not_depend_on_what_was_computed_before(start: Start) -> None:
    engine = start(bits=True)
    [first] = run(engine, request(PROMPT, max_new_tokens=20))
    second = request([*PROMPT, *first.output_ids, *TOOL], max_new_tokens=20)
    [after], [alone] = run(engine, second), run(start(bits=True), second)
    assert (after.output_ids, after.logprobs) == (alone.output_ids, alone.logprobs)
    assert counts(engine) == (40 + 75, 40 + 75)
    reusing = start()
    run(reusing, request(PROMPT, max_new_tokens=20))
    assert run(reusing, second)[0].logprobs != alone.logprobs  # which is why nothing is reused here


def test_a_long_prompt_does_not_stop_the_others(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    chunks, generated = [], []
    prefill = engine._runner.prefill

    def record(prompts: Any, slots: Any, images: Any, starts: list[int]) -> torch.Tensor:
        chunks.append([len(prompt) - start for prompt, start in zip(prompts, starts)])
        generated.append(engine._stats.generated_tokens)
        return prefill(prompts, slots, images, starts)

    monkeypatch.setattr(engine._runner, "prefill", record)
    others = [request([5, token], max_new_tokens=120) for token in range(3)]
    futures = [engine.submit(one) for one in others]
    wait_for_tokens(engine, 10)
    chunks.clear()
    generated.clear()
    long = request(LONG, max_new_tokens=10)
    [result] = run(engine, long)
    assert chunks == [[MAX_PREFILL_TOKENS]] * 3 + [[2000 - 3 * MAX_PREFILL_TOKENS]]
    assert [after - before for before, after in itertools.pairwise(generated)] == [3] * 3
    for one, found in zip([long, *others], [result, *[future.result(120) for future in futures]]):
        assert_logprobs(model(), one, found)


def test_an_update_begins_a_prompt_in_chunks_anew(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    new = model(seed=5)
    prefill, num_passes = engine._runner.prefill, 0

    def update(*args: Any) -> torch.Tensor:
        nonlocal num_passes
        num_passes += 1
        if num_passes == 2:
            engine.update_weights({name: p.detach() for name, p in new.named_parameters()}, "1")
        return prefill(*args)

    monkeypatch.setattr(engine._runner, "prefill", update)
    one = request(LONG, max_new_tokens=5)
    assert_logprobs(new, one, run(engine, one)[0])
    assert counts(engine) == (2000 + 2 * MAX_PREFILL_TOKENS, 2000)


def test_low_precision_conversations_have_the_models_logprobs(start: Start) -> None:
    engine = start(dtype=torch.bfloat16)
    [first] = run(engine, request(PROMPT, max_new_tokens=20))
    text = [*PROMPT, *first.output_ids, *TOOL]
    [second] = run(engine, request(text, max_new_tokens=20))
    assert counts(engine)[0] == 40 + 1 + len(TOOL)
    with torch.inference_mode():
        logits = model(dtype=torch.bfloat16)(torch.tensor([text + second.output_ids])).logits[0].float()
    expected = logits[len(text) - 1 : -1].log_softmax(-1)[torch.arange(20), second.output_ids]
    assert (torch.tensor(second.logprobs) - expected).abs().mean() < 0.05


def test_slots_that_held_nan_can_be_used_after_an_update(start: Start) -> None:
    engine = start()
    good = {name: p.detach() for name, p in model().named_parameters()}
    engine.update_weights({name: p * torch.nan for name, p in good.items()}, "1").result(120)
    with pytest.raises(GenerationError, match="finite"):
        run(engine, request(PROMPT))
    engine.update_weights(good, "2").result(120)
    requests = [request([5, 6], max_new_tokens=4), request(PROMPT, max_new_tokens=4)]
    for one, result in zip(requests, run(engine, *requests)):
        assert_logprobs(model(), one, result)
