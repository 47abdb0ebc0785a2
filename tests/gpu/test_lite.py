"""The embedded engine on a GPU samples with the logprobs of a CPU: prefixes, chunks, graphs, updates."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "generation"))
from test_engine import assert_logprobs, many_requests, request, run
from test_prefixes import LONG, PROMPT, TOOL, counts, model
from tiny_models import build, config

from arealite.generation.engine import GenerationEngine
from arealite.generation.model_runner import ModelRunner


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
    """Also by graphs that were captured when they lay elsewhere, and after they have changed in place."""
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
