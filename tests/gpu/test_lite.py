"""The embedded engine on a GPU samples with the logprobs of a CPU: prefixes, chunks, updates."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "generation"))
from test_engine import assert_logprobs, many_requests, request, run
from test_prefixes import LONG, PROMPT, TOOL, counts, model
from tiny_models import build, config

from arealite.generation.engine import GenerationEngine
from arealite.generation.model_runner import ModelRunner
from arealite.generation.sampler import SamplingRows, sample
from arealite.generation.slot_attention import SlotCache


@pytest.fixture
def meta_runner() -> ModelRunner:
    """Return a runner without numbers: what waits for one, or mixes devices, raises."""
    runner = ModelRunner(build(config(), seed=0), slots=8, context=256)
    runner.model.to("meta")
    runner.device = torch.device("meta")
    runner.cache = SlotCache(runner.model, slots=8, context=256)
    return runner


def test_a_step_waits_for_no_number(meta_runner: ModelRunner) -> None:
    requests = many_requests(3)
    rows = SamplingRows([(one.params, 5, frozenset({1})) for one in requests], 48, meta_runner.device)
    with torch.inference_mode():
        logits = meta_runner.prefill([PROMPT, PROMPT[:20], PROMPT], [0, 1, 2], None, [0, 17, 30])
        tokens, logprobs, _ = sample(logits, rows, np.array([40, 20, 40]))
        meta_runner.cache.swap(0, 3, 20)
        logits = meta_runner.decode([1, 2, 3], np.array([40, 20, 40]))
    assert tokens.device.type == logprobs.device.type == "meta"
    assert logits.shape == (3, 48)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_random_arrivals_have_the_models_logprobs(deterministic: bool) -> None:
    runner = ModelRunner(build(config(), seed=0).cuda(), slots=5, context=256, deterministic=deterministic)
    engine = GenerationEngine(runner)
    requests = many_requests(40)
    try:
        for one, result in zip(requests, run(engine, *requests)):
            assert_logprobs(build(config(), seed=0), one, result)
    finally:
        engine.close()


@pytest.mark.gpu
def test_turns_long_prompts_and_updates() -> None:
    engine = GenerationEngine(ModelRunner(model().cuda(), slots=4, context=2048))
    try:
        [first] = run(engine, request(PROMPT, max_new_tokens=20))
        turn = request([*PROMPT, *first.output_ids, *TOOL], max_new_tokens=20)
        assert_logprobs(model(), turn, run(engine, turn)[0])
        assert counts(engine)[0] == 40 + 1 + len(TOOL)
        long = request(LONG, max_new_tokens=10)
        assert_logprobs(model(), long, run(engine, long)[0])
        new = model(seed=5)
        engine.update_weights({name: p.detach() for name, p in new.named_parameters()}, "1").result(120)
        assert_logprobs(new, turn, run(engine, turn)[0])
    finally:
        engine.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_of_a_trainer_are_read_where_they_are(device: str) -> None:
    """Also after they have changed in place."""
    runner, trained = ModelRunner(build(config(), seed=0).to(device), slots=5, context=256), build(config(), seed=1)
    engine, requests = GenerationEngine(runner), many_requests(10)
    weights = {name: parameter.detach() for name, parameter in trained.to(device).named_parameters()}
    try:
        run(engine, *requests)
        for version in ("1", "2"):
            engine.update_weights(weights, version, shares=True).result(120)
            reference = copy.deepcopy(trained).cpu()
            for one, result in zip(requests, run(engine, *requests)):
                assert result.version == version
                assert_logprobs(reference, one, result)
            engine.await_weights().result(120)
            for weight in weights.values():
                weight.mul_(1.1)
    finally:
        engine.close()
